"""Time one optimizer step on all ranks: from each rank's own gradients to the new weights being whole everywhere.

No forward and no backward: nothing overlaps, for nobody. Before its times are believed, every method's bytes are
counted in a step and compared with the formulas. Functions here run on the ranks; ``bench`` launches them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from dist_lib.comm import CommCounter, collectives, launch
from labs.dmuon.config import Config
from labs.dmuon.methods import Method, build


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is timed.

    Attributes:
        model: name of a decoder configuration.
        ranks: processes of one thread each.
        steps: timed in one launch.
    """

    model: str = "small-4m"
    ranks: int = 4
    steps: int = 3

    def config(self) -> Config:
        """Settings of the lab in which weights are published before the step returns.

        No forward or backward is timed that messages could hide behind, so each owner's matrices travel in one.
        """
        return Config(
            model=self.model,
            steps=self.steps,
            batch_size=self.ranks,
            seq_len=1,
            lr=1e-2,
            adamw_lr=1e-2,
            publish="sync",
            packs="model",
            ordered=False,
        )


@dataclass(frozen=True)
class Timing:
    """One method on all ranks.

    Attributes:
        step_s: seconds of a step by its slowest rank: the fastest of the timed steps.
        payload: bytes that each rank handed to collectives in one step.
        formula: what they should be.
        orthogonalised: how often a matrix went through Newton-Schulz in one step, all ranks together, on average.
    """

    step_s: float
    payload: tuple[int, ...]
    formula: tuple[int, ...]
    orthogonalised: float


def set_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Give every parameter a random gradient that depends on the rank and the step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def counted_step(method: Method, rank: int, step: int) -> int:
    """Make one step and return the bytes that this rank handed to collectives in it. Collective."""
    set_gradients(method.model, rank, step)
    with CommCounter() as counter:
        method.optimizer.step()
    method.optimizer.zero_grad()
    return method.payload(counter)


def timed_step(method: Method, rank: int, step: int) -> float:
    """Make one step and return its seconds on this rank, from a barrier on. Collective."""
    set_gradients(method.model, rank, step)
    collectives.barrier()
    begin = time.perf_counter()
    method.optimizer.step()
    elapsed = time.perf_counter() - begin
    method.optimizer.zero_grad()
    return elapsed


def run_method(name: str, work: Work) -> tuple[list[float], int, int, float]:
    """On one rank: seconds of each timed step, counted and expected bytes of one, orthogonalisations of a matrix."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    method = build(name, work.config(), seed=0, world=work.ranks, device=torch.device("cpu"))
    counted_step(method, rank, 0)  # warms up: buffers and states are made
    payload = counted_step(method, rank, 1)
    seconds = [timed_step(method, rank, 2 + step) for step in range(work.steps)]
    times = method.optimizer.total_histogram()
    each = sum(times.values()) / len(times) / (2 + work.steps) if times else 0.0
    return seconds, payload, method.formula(rank, "ddp"), each


def measure(name: str, work: Work) -> Timing:
    """Launch the ranks and time one method.

    Args:
        name: one of :data:`~labs.dmuon.config.NAMES`.
        work: what to time.

    Raises:
        RankError: a rank failed; an unknown name, for one.
    """
    found = launch(run_method, world_size=work.ranks, args=(name, work), timeout_s=300)
    steps = zip(*(seconds for seconds, *_ in found), strict=True)
    return Timing(
        step_s=min(max(step) for step in steps),
        payload=tuple(payload for _, payload, _, _ in found),
        formula=tuple(formula for _, _, formula, _ in found),
        orthogonalised=found[0][3],
    )
