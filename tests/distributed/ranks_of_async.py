"""What the ranks of test_async_runtime and test_async_faults do; no rank has to import pytest."""

import time

import torch
import torch.nn.functional as F
from torch import nn

from dist_lib.async_pipeline import runtime
from dist_lib.async_pipeline.baselines import FlushedBaseline
from dist_lib.async_pipeline.checkpoint import load_checkpoint, save_checkpoint
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.emulator import DelayedTrainer
from dist_lib.async_pipeline.mesh import PipelineMesh
from dist_lib.async_pipeline.runtime import Pipeline
from dist_lib.async_pipeline.stages import split_decoder
from dist_lib.comm import CommCounter
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import Muon

UPDATES = 5


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shape(tied=False, layers=4):
    return DecoderConfig(
        vocab_size=32,
        d_model=16,
        n_layers=layers,
        n_heads=2,
        n_kv_heads=2,
        d_ff=24,
        max_seq_len=8,
        tie_embeddings=tied,
    )


def batches(count, rows, seed=3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (count, rows, 7), generator=generator)
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


class Both(torch.optim.Optimizer):
    """Muon for a stage's matrices, AdamW for its embedding, head and norms."""

    def __init__(self, named):
        inner = [(n, p) for n, p in named if p.ndim == 2 and "embed" not in n and "head" not in n]
        rest = [(n, p) for n, p in named if all(p is not q for _, q in inner)]
        groups = [
            {"params": [p for _, p in inner], "momentum": 0.95},
            {"params": [p for _, p in rest], "momentum": 0.9},
        ]
        super().__init__([g for g in groups if g["params"]], {})
        self.parts = [Muon([p for _, p in inner], lr=0.02)] if inner else []
        self.parts += [torch.optim.AdamW([p for _, p in rest], lr=0.01)] if rest else []

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def adamw(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {"adamw": adamw, "muon": Both}


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def modules(p, tied=False, layers=4):
    return split_decoder(Decoder(shape(tied, layers), seed=1), p)


def build(mesh, config, optimizer="adamw", tied=False, **options):
    return Pipeline(
        modules(mesh.stages, tied),
        loss_fn=loss_fn,
        make_optimizer=OPTIMIZERS[optimizer],
        config=config,
        mesh=mesh,
        **options,
    )


def twin(p, config, optimizer="adamw", tied=False, kind=DelayedTrainer, **options):
    return kind(modules(p, tied), loss_fn=loss_fn, make_optimizer=OPTIMIZERS[optimizer], config=config, **options)


def outcome(pipeline, losses):
    """All that a run must have in common with its twin: losses, and weights at both versions."""
    newest = {name: p.detach().clone() for name, p in pipeline.module.named_parameters()}
    older = pipeline.versions.at(max(pipeline.step - 1, 0)) if pipeline.versions.copies > 1 else newest
    return losses, newest, {name: w.detach().clone() for name, w in older.items()}


def run_cases(cases):
    """Run each case (AsyncConfig options, optimizer, tied) on fresh pipelines of one mesh."""
    mesh, found = PipelineMesh(), {}
    for name, (options, optimizer, tied) in cases.items():
        config = AsyncConfig(**options)
        decay = scheduler if optimizer == "adamw" else None
        pipeline = build(mesh, config, optimizer, tied, make_scheduler=decay, record_events=True)
        found[name] = (*outcome(pipeline, pipeline.run(batches(UPDATES, rows(config)))), pipeline.events)
    return found


def rows(config):
    return 2 * config.micro_batches


class Eager(runtime._Run):
    """Makes each update as soon as it can be made: other times, the same versions."""

    def _backward(self):
        super()._backward()
        self._make_version(self.finished)


class ReadsNewest(runtime.WeightVersions):
    """The fault: a forward reads the newest weights, whatever version it was asked for."""

    def forward(self, version, x):
        self._read = getattr(self, "_read", [])
        self._read.append(self.newest)
        return super().forward(self.newest, x)

    def release(self, version):
        return super().release(self._read.pop(0))


class UpdatesInPlace(runtime.WeightVersions):
    """The fault: one bank, and updates that do not ask who still needs it."""

    def __init__(self, module, copies):
        super().__init__(module, 1)

    def at(self, version):
        return self._banks[0]

    def advance(self, gradients, step):
        self._graphs.clear()
        super().advance(gradients, step)


def with_fault(fault, options):
    """One run with a planted fault; what ``outcome`` gives, or the error of this rank."""
    if fault in ("eager", "reads newest"):
        runtime._Run = Eager
    if fault == "reads newest":
        runtime.WeightVersions = ReadsNewest
    if fault in ("in place", "in place, unseen"):
        runtime.WeightVersions = UpdatesInPlace
    if fault == "in place, unseen":
        torch.autograd.graph.increment_version = lambda tensor: None
    config = AsyncConfig(**options)
    pipeline = build(PipelineMesh(), config)
    return outcome(pipeline, pipeline.run(batches(UPDATES, rows(config))))


def replicas(options, optimizer):
    """Two replicas of two stages, each rank starting from other weights than replica 0."""
    mesh = PipelineMesh(2, replicas=2)
    config = AsyncConfig(**options)
    pipeline = Pipeline(
        split_decoder(Decoder(shape(True), seed=1 + mesh.replica), 2),
        loss_fn=loss_fn,
        make_optimizer=OPTIMIZERS[optimizer],
        config=config,
        mesh=mesh,
    )
    return outcome(pipeline, pipeline.run(batches(UPDATES, 2 * rows(config))))


class Dropping(nn.Module):
    """A stage with dropout, a buffer, and a parameter that the loss does not depend on."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inner = nn.Linear(8, 8)
            self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return F.dropout(torch.tanh(self.inner(x)), 0.25)


def squares(output, targets):
    return (output - targets).square().mean()


def dropping(mesh, seed):
    config = AsyncConfig(
        micro_batches=2, clip_norm=0.1, error_feedback=True, ef_dtype=torch.bfloat16, timeout_s=mesh.timeout_s
    )
    torch.manual_seed(seed + mesh.stage)
    module = Dropping(seed + mesh.stage)
    options = {"config": config, "mesh": mesh, "make_scheduler": scheduler}
    return Pipeline(module, loss_fn=squares, make_optimizer=adamw, **options)


def resumed(directory):
    """Whether a run that was stopped, saved and loaded into another pipeline ends like one that was not; and what
    a checkpoint that broke off and one of another configuration do."""
    mesh = PipelineMesh()
    generator = torch.Generator().manual_seed(5)
    data = [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(9)]
    whole = dropping(mesh, 1)
    expected = whole.run(data)
    first = dropping(mesh, 1)
    losses = first.run(data[:2])
    save_checkpoint(first, directory)
    losses += first.run(data[2:5])
    saved = save_checkpoint(first, directory)
    seen = first.module.seen.item()
    (saved.parent / "step-00000009.partial").mkdir(exist_ok=True)  # as a later save leaves it that did not end
    second = dropping(mesh, 7)
    step = load_checkpoint(second, directory)
    assert second.module.seen.item() == seen == 5 * 2
    losses += second.run(data[step:])
    same = losses == expected
    for name, tensor in whole.module.state_dict().items():
        same = same and torch.equal(tensor, second.module.state_dict()[name])
    other = Pipeline(Dropping(1), loss_fn=squares, make_optimizer=adamw, config=AsyncConfig(micro_batches=2), mesh=mesh)
    try:
        load_checkpoint(other, directory)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return same, step, sorted(p.name for p in saved.parent.iterdir()), refused


def sleepy(seed):
    """Short runs with random sleeps in every stage; each must end as without them."""
    mesh, wrong = PipelineMesh(timeout_s=20.0), 0
    random = torch.Generator().manual_seed(seed + 100 * mesh.stage)
    for m in (mesh.stages - 1, mesh.stages, 2 * mesh.stages):
        for delay in (0, 1):
            config = AsyncConfig(micro_batches=m, delay=delay, clip_norm=0.5, allow_edge=True, timeout_s=20.0)
            data = batches(4, rows(config))
            results = []
            for slow in (False, True):
                pipeline = build(mesh, config, tied=True)
                if slow:
                    pipeline.module.register_forward_pre_hook(
                        lambda *_: time.sleep(0.006 * torch.rand((), generator=random).item())
                    )
                results.append(outcome(pipeline, pipeline.run(data)))
            wrong += sum(not same(results[0], result) for result in results[1:])
    return wrong


def same(a, b):
    """Whether two outcomes are equal bit for bit."""
    weights = all(torch.equal(x[name], y[name]) for x, y in zip(a[1:3], b[1:3], strict=True) for name in x)
    return a[0] == b[0] and weights


def counted():
    """What one run sends: (count, bytes) by kind, apart from what is agreed before it."""
    mesh = PipelineMesh()
    pipeline = build(mesh, AsyncConfig(micro_batches=4, clip_norm=1.0), tied=True)
    data = batches(4, 8)
    pipeline.run(data[:1])
    with CommCounter() as counter:
        pipeline.run(data[1:])
    return counter.table()


def against_torch(schedule):
    """Largest difference of losses and weights between a delay of 0 and torch's own flushed pipeline."""
    mesh = PipelineMesh()
    config = AsyncConfig(micro_batches=4, delay=0, clip_norm=0.5)
    data = batches(4, 8)
    ours = build(mesh, config, tied=True)
    theirs = FlushedBaseline(
        modules(mesh.stages, tied=True),
        loss_fn=loss_fn,
        make_optimizer=adamw,
        config=config,
        mesh=mesh,
        schedule=schedule,
    )
    a, b = torch.tensor(ours.run(data)), torch.tensor(theirs.run(data))
    weights = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    return (a - b).abs().max().item(), max((x - y).abs().max().item() for x, y in weights)
