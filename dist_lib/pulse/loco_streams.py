"""Synthetic rounds of PULSELoCo in one process, to measure what its gate lets through without a model.

Weights are normal, gradients independent and normal; every worker draws its own and keeps an AdamW state of its own.
Gate, error feedback, message and outer step are those of the library. Real gradients are bursty and correlated, so this
shows how density follows from learning rate, round length and number of workers, not what a certain model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_lib.pulse.codecs import SEGMENT
from dist_lib.pulse.loco import feedback, gate
from dist_lib.pulse.loco_config import OuterConfig
from dist_lib.pulse.loco_loop import nesterov_step
from dist_lib.pulse.loco_payload import SparseUpdate, encode_update
from dist_lib.pulse.sparsity_measures import ulp


@dataclass(frozen=True)
class SyntheticRound:
    """One round.

    Attributes:
        round: count from 1.
        gate_density: share of coordinates that a worker sends, mean over workers.
        union_density: share of coordinates that any worker sends.
        bytes_per_parameter: of a worker's message, mean over workers; a dense one has 4. NaN where not coded.
        step_in_spacings: mean of ``|s|`` (pseudo-gradient and error feedback) over the weight's bfloat16 spacing.
    """

    round: int
    gate_density: float
    union_density: float
    bytes_per_parameter: float
    step_in_spacings: float


@dataclass
class _AdamW:
    """AdamW without weight decay on one vector."""

    m: Tensor
    v: Tensor
    steps: int = 0

    def step(self, w: Tensor, gradient: Tensor, lr: float, betas: tuple[float, float]) -> None:
        self.steps += 1
        self.m.lerp_(gradient, 1 - betas[0])
        self.v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        root = (self.v / (1 - betas[1] ** self.steps)).sqrt_().add_(1e-8)
        w.addcdiv_(self.m, root, value=-lr / (1 - betas[0] ** self.steps))


def synthetic_rounds(
    cells: int,
    *,
    lr: float,
    rounds: int,
    config: OuterConfig | None = None,
    workers: int = 4,
    std: float = 0.02,
    betas: tuple[float, float] = (0.9, 0.999),
    coded: bool = False,
    seed: int = 0,
) -> Iterator[SyntheticRound]:
    """Yield rounds of ``workers`` that train ``cells`` independent weights.

    Args:
        cells: number of weights, at most 2^22.
        lr: constant learning rate of the inner AdamW.
        rounds: how many to yield.
        config: of the outer loop.
        workers: how many there are.
        std: of the initial weights.
        betas: AdamW's decay rates.
        coded: whether messages are coded and measured, for which numba and zstandard are needed.
        seed: of weights and gradients.

    Raises:
        ValueError: sizes outside their range.
    """
    if not 1 <= cells <= SEGMENT or workers < 1:
        raise ValueError(f"{cells} cells and {workers} workers; allowed are 1 to {SEGMENT} cells and at least 1 worker")
    config = config or OuterConfig()
    generator = torch.Generator().manual_seed(seed)
    theta, momentum = torch.randn(cells, generator=generator) * std, torch.zeros(cells)
    inner = [_AdamW(torch.zeros(cells), torch.zeros(cells)) for _ in range(workers)]
    errors = [torch.zeros(cells) for _ in range(workers)]
    for round in range(1, rounds + 1):
        g, union = torch.zeros(cells), torch.zeros(cells, dtype=torch.bool)
        spacing = ulp(theta)
        density = size = spacings = 0.0
        for worker in range(workers):
            w = theta.clone()
            for _ in range(config.inner_steps):
                inner[worker].step(w, torch.randn(cells, generator=generator), lr, betas)
            s = (theta - w).add_(errors[worker])
            mask = gate(theta, s, config.gate_dtype)
            sent, errors[worker] = feedback(s, mask)
            g += sent
            union |= mask
            density += float(mask.double().mean()) / workers
            spacings += float((s.abs() / spacing).double().mean()) / workers
            if coded:
                positions = mask.nonzero().view(-1)
                segment = (positions.to(torch.int32).numpy().view("u4"), s[positions].numpy())
                size += len(encode_update(SparseUpdate(round, worker, cells, (segment,)))) / (cells * workers)
        nesterov_step(theta, momentum, g.div_(workers), lr=config.outer_lr, mu=config.outer_momentum)
        yield SyntheticRound(round, density, float(union.double().mean()), size if coded else float("nan"), spacings)
