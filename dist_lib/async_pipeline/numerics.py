"""The arithmetic of a batch that the runtime and the emulator must do in the same order, defined once for both.

Micro-batches are equal rows of the batch in ascending order; their gradients are added in that order and divided by
their number once; the squared norm is one float32 number for each stage, added in the order of the stages. It is plain
tensor arithmetic: nothing here knows about schedules, processes or weight versions. Sums of floats depend on their
order, so two programs that agree on everything else still differ in the last bits unless they agree on this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def split_batch(batch: Tensor, micro_batches: int) -> list[Tensor]:
    """Equal rows of a batch, in ascending order.

    Args:
        batch: (rows, ...).
        micro_batches: m.

    Returns:
        m views of shape (rows / m, ...).

    Raises:
        ValueError: no rows, m below 1, or rows that m does not divide. (The gradient of the batch's mean loss is the
            mean over micro-batches only if they are equal.)
    """
    rows = batch.shape[0] if batch.ndim else 0
    if micro_batches < 1 or rows < 1 or rows % micro_batches:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {micro_batches} equal micro-batches: give a multiple of the "
            f"number of micro-batches, and leave out or pad an uneven last batch"
        )
    return list(batch.split(rows // micro_batches))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype gradients are added up: float32 for half types, otherwise their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def accumulate(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of one micro-batch to the sums, in place; call once a micro-batch, in ascending order.

    Args:
        sums: one entry for each parameter, None before its first gradient; entries are replaced or added to.
        gradients: of the micro-batch, in the same order; None where the loss does not depend on the parameter. They
            are copied: autograd may return one tensor for two parameters that are added, or an expanded one.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(sums) != len(gradients):
        raise ValueError(f"{len(gradients)} gradients for {len(sums)} sums: give one (or None) for each parameter")
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        total = sums[index]
        if total is None:
            dtype = accumulation_dtype(gradient.dtype)
            sums[index] = gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            total.add_(gradient)


def average(sums: Sequence[Tensor | None], micro_batches: int) -> None:
    """Divide the sums by the number of micro-batches, in place, once."""
    for total in sums:
        if total is not None:
            total.div_(micro_batches)


def norm_partial(gradients: Iterable[Tensor | None]) -> Tensor:
    """Sum of the squares of a stage's gradients: a float32 scalar, parameters in order.

    Args:
        gradients: averaged; None is skipped. A weight that two stages hold belongs into the partial of one of them.

    Returns:
        Scalar on the gradients' device (on the CPU if there is none).
    """
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            continue
        square = gradient.float().square().sum()
        total = square if total is None else total.add_(square)
    return torch.zeros(()) if total is None else total


def total_norm(partials: Sequence[Tensor]) -> Tensor:
    """Norm over all stages from their partial sums of squares, added in the order of the stages: a float32 scalar."""
    total = torch.zeros((), device=partials[0].device if partials else "cpu")
    for partial in partials:
        total = total + partial.to(device=total.device, dtype=torch.float32)
    return total.sqrt()


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """``min(1, clip_norm / norm)`` as a float32 scalar; 1 where the norm is 0, NaN where it is NaN.

    Raises:
        ValueError: a ``clip_norm`` that is not positive and finite.
    """
    if not 0.0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm = {clip_norm}: it must be positive and finite; use None not to clip")
    return (clip_norm / norm).clamp(max=1.0)


def scale(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by a scalar in place; also by 1, so that no one needs to wait for its value."""
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))


def mean_loss(losses: Sequence[float]) -> float:
    """Mean of the micro-batches' losses: added in ascending order as Python floats, divided once.

    Raises:
        ValueError: no losses.
    """
    if not losses:
        raise ValueError("there are no losses to average")
    total = 0.0
    for loss in losses:
        total += loss
    return total / len(losses)
