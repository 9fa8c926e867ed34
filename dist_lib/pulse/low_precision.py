"""How often the bits that a low-precision receiver holds change, format by format, for the same step of training.

A cell of a coarser grid crosses its rounding edges less often, so payloads get sparser with fewer bits; scales made
from a block's largest weight may change at every step or hardly ever, depending on what they are made of. The
quantisers here are plain references for this comparison: INT8 with a scale for each row, and MXFP4 (E2M1 in blocks of
32 with a power-of-two scale, as the OCP microscaling formats define it). FP8 is in :mod:`dist_lib.pulse.fp8`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dist_lib.pulse.fp8 import quantise_fp8

MX_BLOCK = 32
Quantiser = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def quantise_int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``weight / scale`` with ``scale = largest of the row / 127``: (M, N) -> (M, N) int8 and (M, 1) float32."""
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / 127)
    return (wide / scale).round().clamp(-127, 127).to(torch.int8), scale


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 codes and shared exponents of blocks of 32 along the rows.

    Args:
        weight: (M, N) with N a multiple of 32.

    Returns:
        Codes (M, N) uint8 with the sign in bit 3, and exponents (M, N / 32) int16. A weight is about
        ``sign * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * 2 ** exponent``. Ties go to even codes; what is above 6 is 6.

    Raises:
        ValueError: N is no multiple of 32.
    """
    rows, cols = weight.shape
    if cols % MX_BLOCK:
        raise ValueError(f"rows of {cols} weights cannot be cut into blocks of {MX_BLOCK}")
    cut = weight.float().view(rows, -1, MX_BLOCK)
    largest = cut.abs().amax(2)
    exponent = torch.where(largest == 0, 0, torch.frexp(largest).exponent - 1 - 2).clamp(min=-127)
    size = torch.ldexp(cut, -exponent[..., None]).abs()
    code = torch.zeros_like(cut, dtype=torch.uint8)
    for edge, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (size >= edge) if tie_goes_up else (size > edge)
    code |= torch.signbit(cut).to(torch.uint8) << 3
    return code.view(rows, cols), exponent.to(torch.int16)


def _bfloat16(weight: Tensor) -> tuple[Tensor, None]:
    return weight.bfloat16(), None


FORMATS: Mapping[str, Quantiser] = {
    "BF16": _bfloat16,
    "FP8, 128 x 128, float32 scale": partial(quantise_fp8, scales="float32"),
    "FP8, 128 x 128, power-of-two scale": quantise_fp8,
    "INT8, rows, float32 scale": quantise_int8_rows,
    "MXFP4, blocks of 32": quantise_mxfp4,
}


@dataclass(frozen=True)
class ChangeRate:
    """Shares of elements and of scales whose bits differ; ``scales`` is None for formats without."""

    elements: float
    scales: float | None


def _differ(a: Tensor, b: Tensor) -> float:
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return float((a.view(word) != b.view(word)).double().mean())


def change_rates(old: Tensor, new: Tensor, *, through_bf16: bool = False) -> dict[str, ChangeRate]:
    """Quantise one matrix before and after a step in every format, and compare bits.

    Args:
        old, new: (M, N) float32 masters, N a multiple of 32.
        through_bf16: quantise the bfloat16 cast of the masters and not the masters themselves.

    Returns:
        The rates by name of the format.
    """
    rates = {}
    for name, quantise in FORMATS.items():
        (a, a_scale), (b, b_scale) = (quantise(w.bfloat16() if through_bf16 else w) for w in (old, new))
        scales = None if a_scale is None or b_scale is None else _differ(a_scale, b_scale)
        rates[name] = ChangeRate(_differ(a, b), scales)
    return rates
