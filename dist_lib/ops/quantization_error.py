"""How far each number format moves numbers of a known distribution: the table behind the choice of a codec.

Three distributions: normal; Student's t with 3 degrees of freedom (heavy tails); and ``silu(a) * b`` of two normals,
which is what a gated MLP feeds its last product. The error is the relative L2 distance after one trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_lib.ops.codecs import CODECS
from dist_lib.ops.quantization import quantize

DISTRIBUTIONS = ("gaussian", "student-t(3)", "silu*normal")


@dataclass(frozen=True)
class CodecError:
    """One cell of the table: ``relative_l2`` = ``|decoded - x| / |x|``; ``bits`` counts the scale's share too."""

    codec: str
    block_size: int
    distribution: str
    bits: float
    relative_l2: float


def samples(distribution: str, count: int, seed: int = 0) -> Tensor:
    """``count`` float32 numbers of one of :data:`DISTRIBUTIONS`.

    Raises:
        ValueError: another name.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    if distribution == "gaussian":
        return x
    if distribution == "student-t(3)":
        return x / torch.randn(3, count, generator=generator).square().mean(0).sqrt()
    if distribution == "silu*normal":
        return F.silu(x) * torch.randn(count, generator=generator)
    raise ValueError(f"distribution {distribution!r} is not one of {', '.join(DISTRIBUTIONS)}")


def error_table(
    *,
    codecs: Sequence[str] = tuple(CODECS),
    block_sizes: Sequence[int] = (64, 128, 256),
    distributions: Sequence[str] = DISTRIBUTIONS,
    scale_dtype: torch.dtype = torch.float32,
    count: int = 2**20,
    seed: int = 0,
) -> Iterator[CodecError]:
    """The relative error of each codec, block size and distribution, on ``count`` numbers drawn from ``seed``."""
    for distribution in distributions:
        x = samples(distribution, count, seed)
        norm = x.double().norm()
        for name in codecs:
            for block_size in block_sizes:
                q = quantize(x, name, block_size, scale_dtype, flat=True)
                error = float((q.dequantize() - x).double().norm() / norm)
                yield CodecError(name, block_size, distribution, q.nbytes * 8 / count, error)
