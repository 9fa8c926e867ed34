"""GPU checks of owner-sharded Muon on one rank: the whole path through NCCL, what overlaps in it, what a step costs.

One rank owns everything, so no link is tested and no balance: what is tested is that hooks, streams, buffers, masters
and FSDP2 leave the weights of single-process Muon, that bytes handed to NCCL are those of the formulas, and that layers
wait for their own weights alone. The last part times a whole step of one decoder layer's matrices against Muon as it is
usually written: matrix after matrix, the direct form, torch alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dist_lib.comm import CommCounter, distributed
from dist_lib.dmuon import DMuon, DMuonDDP, OwnerPlan, RuntimeConfig, make_plan, model_state_dict
from dist_lib.dmuon.bytes import step_payload
from dist_lib.dmuon.events import Event, exposed_seconds
from dist_lib.dmuon.runtime import Runtime
from dist_lib.models import CONFIGS, Decoder, DecoderConfig
from dist_lib.models.decoder import DecoderLayer
from dist_lib.ops import resolve
from dist_lib.optim import Muon, MuonWithAdamW, split_parameters, update_scale
from dist_lib.optim.muon import apply_update, next_momentum
from labs.gpu.newton_schulz import ROUNDING, fused_direct
from labs.gpu_check import GpuReport

Mode = Literal["ddp", "fsdp-keep", "fsdp-free"]
MODES: tuple[Mode, ...] = ("ddp", "fsdp-keep", "fsdp-free")
SMALL = DecoderConfig(
    vocab_size=256,
    d_model=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    d_ff=160,
    max_seq_len=32,
    tie_embeddings=False,
)
LARGE = DecoderConfig(
    vocab_size=1024,
    d_model=1024,
    n_layers=8,
    n_heads=8,
    n_kv_heads=8,
    d_ff=2816,
    max_seq_len=256,
    tie_embeddings=False,
)
LAYERS = ("smollm2-135m", "tinyllama-1.1b", "llama2-7b", "llama3-8b")  # whose decoder layers are timed
LAYER_SECONDS = 25.0  # a layer is started only if this much time is left
LR = 1e-2


def random_batches(config: DecoderConfig, count: int, device: str, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets, drawn anew in every run; each (rows, max_seq_len)."""
    tokens = torch.randint(config.vocab_size, (count, 2, rows, config.max_seq_len), device=device)
    return [(pair[0], pair[1]) for pair in tokens]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over all tokens, nats."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def make_runtime(mode: Mode, model: nn.Module, plan: OwnerPlan, config: RuntimeConfig) -> Runtime:
    """The runtime of a mode.

    Raises:
        ImportError: a mode of FSDP2 where torch has none.
    """
    if mode == "ddp":
        return DMuonDDP(model, plan, config=config)
    from dist_lib.dmuon import DMuonFSDP

    return DMuonFSDP(model, plan, config=config, reshard_after_forward=mode == "fsdp-free")


def _single_process(config: DecoderConfig, device: str, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model = Decoder(config, seed=0).to(device)
    optimizer = MuonWithAdamW(model, lr=LR)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def _owned(
    mode: Mode, config: DecoderConfig, device: str, batches: Sequence[tuple[Tensor, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int], dict[str, int]]:
    """Weights, orthogonalisations by name, and the bytes of the last step, counted and by the formula."""
    model = Decoder(config, seed=0).to(device)
    plan = make_plan(split_parameters(model).muon, 1, max_batch=1024)  # batches as in the single process
    runtime = make_runtime(mode, model, plan, RuntimeConfig(publish="async"))
    optimizer = DMuon(runtime, LR)
    for batch in batches:
        with CommCounter() as counter:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = step_payload(mode, plan)[0]
    counted = {op: counter.bytes(op) for op in expected}
    weights = {name: t.cpu() for name, t in model_state_dict(runtime).items()}
    times = optimizer.total_histogram()
    runtime.close()
    return weights, times, counted, expected


def _apart(found: dict[str, Tensor], twin: dict[str, Tensor], moved: dict[str, float]) -> tuple[float, str]:
    """Largest distance of a tensor from its twin as a share of what the twin moved, and its name; NaN stays NaN."""
    share = {n: float((found[n] - twin[n]).double().norm()) / moved[n] for n in twin}
    worst = max(share, key=lambda n: float("inf") if share[n] != share[n] else share[n])
    return share[worst], worst


def check_path(report: GpuReport, device: str, mode: Mode, config: DecoderConfig = SMALL, *, steps: int = 4) -> None:
    """Train with owners in a group of one and compare with single-process Muon from the same batches.

    On a CPU every bit must be equal. A GPU adds some gradients in no fixed order and rounds in half precision: there,
    the single process is run twice, and owners may stray from it three times as far as it strays from itself, and
    :data:`~labs.gpu.newton_schulz.ROUNDING` further.
    """
    batches = random_batches(config, steps, device)
    start = {name: p.detach() for name, p in Decoder(config, seed=0).named_parameters()}
    twin = _single_process(config, device, batches)
    found, times, counted, expected = _owned(mode, config, device, batches)
    moved = {n: float((twin[n] - start[n]).double().norm()) for n in twin}
    if found.keys() != twin.keys() or min(moved.values()) == 0:
        report.check(f"{mode}: one rank equals single-process Muon", False, "other names, or weights that never moved")
        return
    share, worst = _apart(found, twin, moved)
    again = 0.0 if device == "cpu" else _apart(_single_process(config, device, batches), twin, moved)[0]
    limit = 0.0 if device == "cpu" else ROUNDING + 3 * again
    equal = sum(torch.equal(found[n], twin[n]) for n in twin)
    text = f"{equal} of {len(twin)} weights have the same bits; {worst} is apart by {share:.1e} of what it moved"
    text += f", limit {limit:.1e} (the single process from itself: {again:.1e})"
    values = {"equal": equal, "share": share, "again": again}
    title = f"{mode}, d = {config.d_model}"
    report.check(f"{title}: one rank equals single-process Muon", share <= limit, text, **values)
    once = bool(times) and set(times.values()) == {steps}
    text = f"{len(times)} matrices, {min(times.values())} to {max(times.values())} times in {steps} steps"
    report.check(f"{title}: every matrix orthogonalised once a step", once, text)
    text = ", ".join(f"{op} {n}" for op, n in counted.items()) + f"; formula {expected}"
    report.check(f"{title}: bytes of a step", counted == expected, text, counted=counted, expected=expected)


def trace(device: str, config: DecoderConfig, *, rows: int = 4) -> list[Event]:
    """Events of one step after another: the old weights' arrival, forward, backward, reduction and the new update."""
    model = Decoder(config, seed=0).to(device)
    plan = make_plan(split_parameters(model).muon, 1)
    runtime = DMuonDDP(model, plan, config=RuntimeConfig(publish="async", record=True))
    optimizer = DMuon(runtime, LR)
    batches = random_batches(config, 3, device, rows)
    for index, batch in enumerate(batches):
        if index == len(batches) - 1:
            runtime.log.clear()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    events = runtime.log.events
    runtime.close()
    return events


def check_overlap(report: GpuReport, device: str, config: DecoderConfig = SMALL, *, rows: int = 4) -> None:
    """Whether transfers stand beside computation: each layer's weights arrive just before its forward, after others'
    forwards have begun; the first gradients leave before the last ones are computed.
    """
    events = trace(device, config, rows=rows)
    layers = [f"layers.{i}" for i in range(config.n_layers)]
    by: dict[str, dict[str, Event]] = {k: {} for k in ("publish", "wait", "forward", "backward", "reduce")}
    for e in events:
        if e.kind in by and e.layer in layers:
            by[e.kind].setdefault(e.layer, e)
    missing = [f"{kind} of {layer}" for kind, seen in by.items() for layer in layers if layer not in seen]
    if missing:
        report.check("overlap trace is complete", False, f"without {', '.join(missing[:4])}")
        return
    first = by["forward"][layers[0]]
    late = [n for n in layers[1:] if by["publish"][n].start < first.start and by["wait"][n].start >= first.end]
    ready = [n for n in layers if by["wait"][n].end <= by["forward"][n].start + 1e-6]
    last = by["backward"][layers[0]]
    early = [n for n in layers[1:] if by["reduce"][n].start < last.end]
    spans = {kind: sum(e.end - e.start for e in events if e.kind == kind) for kind in by}
    exposed = sum(exposed_seconds(events).values())
    text = f"{len(late)} of {len(layers) - 1} layers are waited for after the first layer's forward; "
    text += f"{1e3 * exposed:.2f} ms waited beside {1e3 * spans['forward']:.2f} ms of forward"
    values: dict[str, Any] = {"exposed_s": exposed, **{f"{kind}_s": s for kind, s in spans.items()}}
    report.check("async publication overlaps forward", len(late) == len(layers) - 1, text, **values)
    report.check("no layer runs before its weights", len(ready) == len(layers), f"{len(ready)} of {len(layers)}")
    text = f"{len(early)} of {len(layers) - 1} layers' gradients leave before backward ends"
    report.check("reduction overlaps backward", len(early) == len(layers) - 1, text)
    origin = events[0].start
    shown = [(e.kind, e.layer, e.bytes, e.start - origin, e.end - origin) for e in events]
    report.add("overlap trace", f"{len(shown)} spans, in seconds from the first, are in the JSON file", trace=shown)


class OneByOne:
    """Muon as it is usually written: one matrix after another, three products a step of the direct form, torch alone.

    Args:
        muon: whose parameters (matrices) and options are taken; the momentum is its own.
        dtype: of the products.
    """

    def __init__(self, muon: Muon, dtype: torch.dtype) -> None:
        (self.options,) = muon.param_groups
        self.parameters: list[Tensor] = list(self.options["params"])
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.triples = resolve(self.options["ns_coefficients"], self.options["ns_steps"])
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients."""
        o = self.options
        for p, buffer in zip(self.parameters, self.momentum, strict=True):
            if p.grad is None:
                continue
            options = {"momentum": o["momentum"], "form": o["momentum_form"], "nesterov": o["nesterov"]}
            x = next_momentum(buffer, p.grad, **options)
            tall = x.shape[0] > x.shape[1]
            update = fused_direct((x.mT if tall else x)[None], self.triples, self.dtype)[0]
            update = (update.mT if tall else update) * update_scale(o["scale"], *p.shape)
            apply_update(p, update, lr=o["lr"], weight_decay=o["weight_decay"])


def layer_parameters(config: DecoderConfig, device: str) -> list[nn.Parameter]:
    """The seven matrices of one decoder layer, with random gradients drawn anew in every run."""
    kept = [p for p in DecoderLayer(config).to(device).parameters() if p.ndim == 2]
    for p in kept:
        p.grad = torch.randn(p.shape, device=device)
    return kept


def check_update(report: GpuReport, device: str, config: DecoderConfig) -> tuple[Muon, OneByOne]:
    """One step of a layer by the library and one by one, from the same weights; returns both optimizers."""
    parameters = layer_parameters(config, device)
    ours = Muon(parameters, lr=LR)
    usual = OneByOne(ours, torch.float32 if device == "cpu" else torch.float16)
    start = [p.detach().clone() for p in parameters]
    usual.step()
    direct = [p.detach().clone() for p in parameters]
    for p, value in zip(parameters, start, strict=True):
        p.data.copy_(value)
    ours.step()
    moved = [float((d - s).norm()) for d, s in zip(direct, start, strict=True)]
    share = [float((p.detach() - d).norm()) / m for p, d, m in zip(parameters, direct, moved, strict=True)]
    good = min(moved) > 0 and all(s < ROUNDING for s in share)
    text = f"updates are apart by {max(share):.1e}"
    report.check(f"layer of d = {config.d_model}: both ways make the same step", good, text, share=max(share))
    return ours, usual


def time_layers(report: GpuReport, names: Sequence[str] = LAYERS) -> None:
    """What a step of one layer costs by the library and one by one in the direct form."""
    for name in names:
        if report.seconds_left() < LAYER_SECONDS:
            report.add(f"layer of {name}", "not timed: the time budget is nearly used up")
            continue
        config = CONFIGS[name]
        ours, usual = check_update(report, "cuda", config)
        report.time(usual.step, samples=5)  # warms both the device and its libraries up
        baseline, mine = report.time(usual.step), report.time(ours.step)
        shapes = ", ".join(sorted({"x".join(map(str, p.shape)) for p in usual.parameters}))
        report.row(f"Muon step of one layer of {name} ({shapes}), against the direct form one by one", mine, baseline)
        del ours, usual
        torch.cuda.empty_cache()


def run_paths(report: GpuReport, device: str, configs: Sequence[DecoderConfig] = (SMALL, LARGE)) -> None:
    """All checks of the path in a group of one; modes that this torch lacks are named and left out."""
    with distributed(device=device) as context:
        report.add("process group", f"{context.backend}, {context.world_size} rank")
        for config in configs:
            for mode in MODES:
                try:
                    check_path(report, device, mode, config)
                except ImportError as error:
                    report.add(mode, f"left out: {error}")
            check_overlap(report, device, config)


def run(report: GpuReport) -> None:
    """The path, then the times, on the current GPU."""
    torch.manual_seed(int(time.time()))
    run_paths(report, "cuda")
    try:
        time_layers(report)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        report.add("layers", "the larger ones are left out: this GPU has too little memory for them")
