"""Time a real pipeline on this machine: stages that sleep, so that cores do not matter, or stages that multiply.

A run is taken apart by its recorded events: the period between ends of batches on the first stage (fill and drain
excluded), and the idle share over the whole run. Functions here run on the ranks; ``sleeping`` and ``bench`` launch
them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dist_lib.async_pipeline.baselines import FlushedBaseline
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.mesh import PipelineMesh
from dist_lib.async_pipeline.runtime import Pipeline
from dist_lib.async_pipeline.schedules import Event
from dist_lib.comm import collectives, launch


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingStage(nn.Module):
    """One weight, and a fixed time for forward and backward in seconds."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, kept."""
        slept: Tensor = _Sleep.apply(x * self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return slept


class MultiplyingStage(nn.Module):
    """Equal square layers; the first adds a bias, so that every stage computes the gradient of its input."""

    def __init__(self, width: int, layers: int, seed: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(width))
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            torch.randn(width, width, generator=generator) / width**0.5 for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        x = x + self.first
        for weight in self.weights:
            x = x @ weight
        return x


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the stages do.

    Attributes:
        stages, micro_batches, batches: p, m, K.
        forward_s, backward_s: how long a stage sleeps; 0: it multiplies instead.
        rows, width, layers: of a micro-batch, and of a multiplying stage.
    """

    stages: int
    micro_batches: int
    batches: int = 6
    forward_s: float = 0.0
    backward_s: float = 0.0
    rows: int = 256
    width: int = 512
    layers: int = 12

    def stage(self, index: int) -> nn.Module:
        """The module of a stage."""
        if self.forward_s:
            return SleepingStage(self.forward_s, self.backward_s)
        return MultiplyingStage(self.width, self.layers, index)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Random batches, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        shape = (2 * self.micro_batches, 2) if self.forward_s else (self.rows * self.micro_batches, self.width)
        return [
            (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
            for _ in range(self.batches)
        ]


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output * targets).mean()


def _sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-3)


def run_ours(work: Work, delay: int) -> tuple[list[Event], dict[str, float]]:
    """On one rank: the events of this stage after a warm-up, and for how long it was blocked, by reason."""
    mesh = PipelineMesh()
    pipeline = Pipeline(
        work.stage(mesh.stage),
        loss_fn=_loss,
        make_optimizer=_sgd,
        config=AsyncConfig(micro_batches=work.micro_batches, delay=delay, allow_edge=True),
        mesh=mesh,
        record_events=True,
    )
    data = work.data()
    pipeline.run(data[:1])
    pipeline.run(data)
    return pipeline.events, pipeline.waited_s


def run_torch(work: Work) -> float:
    """On one rank: median seconds a batch of torch's own 1F1B after a warm-up; every batch of it fills and drains."""
    mesh, times = PipelineMesh(), list[float]()
    pipeline = FlushedBaseline(
        work.stage(mesh.stage),
        loss_fn=_loss,
        make_optimizer=_sgd,
        config=AsyncConfig(micro_batches=work.micro_batches, delay=0),
        mesh=mesh,
    )
    data = work.data()
    pipeline.run(data[:1])
    for batch in data:
        collectives.barrier()
        begin = time.perf_counter()
        pipeline.run([batch])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@dataclass(frozen=True)
class Timing:
    """One run.

    Attributes:
        period_s: seconds between the ends of two batches on the first stage: the median, the last batch, which drains,
            left out.
        makespan_s: from the first start to the last end on any stage.
        idle: share of ``stages * makespan_s`` in which stages computed nothing.
        busy_per_batch_s: seconds of computing a batch of the busiest stage: the bound of every schedule.
        imbalance: largest over smallest computing time of a stage, minus 1.
        forward_s: median of one forward, all stages.
        slack_periods: from the moment in which the gradient norm of a batch can be known (the last backward on the
            first stage) to the first update that uses it, in forwards plus backwards; median over batches.
        waited_s: by reason, all stages together.
    """

    period_s: float
    makespan_s: float
    idle: float
    busy_per_batch_s: float
    imbalance: float
    forward_s: float
    slack_periods: float
    waited_s: dict[str, float]


def _slack(work: Work, stages: list[list[Event]], pair_s: float) -> float:
    known = {
        e.action.batch: e.end_s
        for e in stages[0]
        if e.action.kind == "backward" and e.action.micro_batch == work.micro_batches - 1
    }
    used = {
        g: min(e.start_s for s in stages for e in s if e.action.kind == "update" and e.action.batch == g) for g in known
    }
    middle = [g for g in known if g < work.batches - 2]  # the last two are made while the pipeline drains
    return statistics.median((used[g] - known[g]) / pair_s for g in middle)


def take_apart(work: Work, found: list[tuple[list[Event], dict[str, float]]]) -> Timing:
    """From what :func:`run_ours` returned on all ranks."""
    events = [e for stage, _ in found for e in stage]
    last = work.micro_batches - 1
    ends = [e.end_s for e in found[0][0] if e.action.kind == "backward" and e.action.micro_batch == last]
    makespan = max(e.end_s for e in events) - min(e.start_s for e in events)
    busy = [sum(e.end_s - e.start_s for e in stage) for stage, _ in found]
    waited: dict[str, float] = {}
    for _, waits in found:
        for reason, seconds in waits.items():
            waited[reason] = waited.get(reason, 0.0) + seconds
    forward, backward = (
        statistics.median(e.end_s - e.start_s for e in events if e.action.kind == kind)
        for kind in ("forward", "backward")
    )
    return Timing(
        period_s=statistics.median(b - a for a, b in itertools.pairwise(ends[:-1])),
        makespan_s=makespan,
        idle=1 - sum(busy) / (work.stages * makespan),
        busy_per_batch_s=max(busy) / work.batches,
        imbalance=max(busy) / min(busy) - 1,
        forward_s=forward,
        slack_periods=_slack(work, [stage for stage, _ in found], forward + backward),
        waited_s=waited,
    )


def measure(work: Work, delay: int) -> Timing:
    """Launch the ranks and time one run."""
    return take_apart(work, launch(run_ours, world_size=work.stages, args=(work, delay), timeout_s=120))


def middle(timings: list[Timing]) -> dict[str, Any]:
    """The run with the median period, as plain data."""
    return asdict(sorted(timings, key=lambda t: t.period_s)[len(timings) // 2])
