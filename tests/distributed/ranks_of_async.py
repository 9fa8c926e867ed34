"""What the ranks of test_async_runtime and test_async_faults do; no rank has to import pytest."""

import torch
import torch.nn.functional as F

from dist_lib.async_pipeline.baselines import FlushedBaseline
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.emulator import DelayedTrainer
from dist_lib.async_pipeline.mesh import PipelineMesh
from dist_lib.async_pipeline.runtime import Pipeline
from dist_lib.async_pipeline.stages import split_decoder
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import Muon

ROWS = 24  # a multiple of all m used


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shape(tied=False, layers=4):
    return DecoderConfig(
        vocab_size=32,
        d_model=32,
        n_layers=layers,
        n_heads=2,
        n_kv_heads=2,
        d_ff=48,
        max_seq_len=8,
        tie_embeddings=tied,
    )


def batches(count, rows=ROWS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (count, rows, 9), generator=generator)
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


def differences(pipeline, losses, trainer, expected):
    """What is not bitwise equal between a run and its twin."""
    theirs = trainer.parameters_by_stage()[pipeline.mesh.stage]
    mine = dict(pipeline.module.named_parameters())
    wrong = [name for name in theirs if not torch.equal(theirs[name], mine[name])]
    return wrong + (["losses"] if losses != expected else [])


def trajectories(cases, updates=8):
    """Run each case (m, configuration options, optimizer, tied) on all ranks and beside it its twin."""
    mesh = PipelineMesh()
    found = {}
    for name, (options, optimizer, tied) in cases.items():
        config = AsyncConfig(allow_edge=True, **options)
        data = batches(updates)
        pipeline = build(mesh, config, optimizer, tied, make_scheduler=scheduler if optimizer == "adamw" else None)
        losses = pipeline.run(data)
        trainer = twin(mesh.stages, config, optimizer, tied, make_scheduler=scheduler if optimizer == "adamw" else None)
        found[name] = differences(pipeline, losses, trainer, trainer.run(data))
    return found


def against_torch(schedule):
    """Largest difference of losses and weights between a delay of 0 and torch's own flushed pipeline."""
    mesh = PipelineMesh()
    config = AsyncConfig(micro_batches=4, delay=0, clip_norm=0.5)
    data = batches(4)
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
