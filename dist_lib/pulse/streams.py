"""Synthetic streams of weights under AdamW, to measure sparsity and codecs without a model.

Weights are normal, gradients independent and normal. Real gradients are bursty and correlated, so a stream of this
kind shows how sparsity follows from storage, step size and Adam's memory, not what a certain model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StreamStep:
    """One step of a stream.

    Attributes:
        step: count from 1.
        old, new: the bfloat16 cast before and after, 1-D.
        update: signed change that the optimizer asked for, float32, 1-D.
        weight: what it was added to, float32, 1-D.
    """

    step: int
    old: Tensor
    new: Tensor
    update: Tensor
    weight: Tensor


def adamw_stream(
    cells: int,
    *,
    lr: float,
    steps: int,
    storage: str,
    std: float = 0.02,
    signal: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    seed: int = 0,
) -> Iterator[StreamStep]:
    """Yield the steps of AdamW (no weight decay) on ``cells`` independent weights.

    Args:
        cells: number of weights.
        lr: constant learning rate.
        steps: how many to yield.
        storage: ``"bf16"`` stores parameters in bfloat16, so a step below half a spacing is lost; ``"fp32"`` keeps
            float32 masters, whose cast is yielded.
        std: of the initial weights.
        signal: size of each gradient's persistent mean against its noise.
        betas: Adam's decay rates.
        seed: of weights and gradients.

    Raises:
        ValueError: an unknown storage.
    """
    if storage not in ("bf16", "fp32"):
        raise ValueError(f"storage must be 'bf16' or 'fp32', not {storage!r}")
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(cells, generator=generator) * std
    if storage == "bf16":
        theta = theta.bfloat16().float()
    mean = torch.randn(cells, generator=generator) * signal
    m, v = torch.zeros(cells), torch.zeros(cells)
    for step in range(1, steps + 1):
        gradient = torch.randn(cells, generator=generator).add_(mean)
        m.lerp_(gradient, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        scale = -lr / (1 - betas[0] ** step)
        update = scale * m / ((v / (1 - betas[1] ** step)).sqrt_() + 1e-8)
        old, after = theta.bfloat16(), theta + update
        new = after.bfloat16()
        yield StreamStep(step, old, new, update, theta)
        theta = new.float() if storage == "bf16" else after
