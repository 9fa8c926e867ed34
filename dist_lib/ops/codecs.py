"""The number formats in which blocks are stored: for each its values, its code bytes and its error bound.

A block of numbers with largest magnitude ``a`` is stored as one code per number and one scale. A code names a value of
the codec's grid, and decodes to ``grid[code] * (a / limit)``, where ``limit`` is the grid's largest value. This module
holds tables and what follows from them; :mod:`dist_lib.ops.quantization` encodes and decodes.

Sources: the FP4 and dynamic 8-bit codes are those of bitsandbytes (Dettmers et al., arXiv 2110.02861 for the dynamic
map), NF4 is QLoRA's (arXiv 2305.14314), E2M1, E4M3 and E5M2 are the formats of the OCP specifications. AGoQ (arXiv
2605.00539) stores activations as block-wise FP4 in blocks of 128.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

BLOCK_SIZES = (32, 64, 128, 256)
SCALE_DTYPES = (torch.float32, torch.float16)


@dataclass(frozen=True)
class Codec:
    """One number format.

    Attributes:
        name: its key in :data:`CODECS`.
        bits: stored bits a number: 4, 5, 6 or 8.
        kind: how a number finds its code. ``"integer"``: rounding, the code is the integer in two's complement;
            ``"signed"``: the magnitude in a table, and a sign bit on top; ``"table"``: rank in a sorted table;
            ``"float8"``: torch's own 8-bit float; ``"minmax"``: rounding between the block's smallest and largest.
        limit: largest value of the grid, in the grid's own unit.
        values: the value of code i, i = 0, 1, ...; in the grid's own unit.
        half_gap: the error bound of a block with largest magnitude ``a``, as a fraction of ``a``: half of the widest
            gap between neighbours. For ``int4_minmax`` the fraction is of ``max - min``.
        about: one line for tables and pages.
    """

    name: str
    bits: int
    kind: str
    limit: float
    values: tuple[float, ...]
    half_gap: float
    about: str

    @property
    def scales_per_block(self) -> int:
        """1, or 2 (step and smallest value) for ``int4_minmax``."""
        return 2 if self.kind == "minmax" else 1

    @property
    def levels(self) -> tuple[float, ...]:
        """The distinct values between -1 and 1 that it can store, ascending (0 to 1 for ``int4_minmax``)."""
        return tuple(sorted({v / self.limit for v in self.values if math.isfinite(v)}))


def _codec(name: str, bits: int, kind: str, values: list[float], about: str) -> Codec:
    finite = sorted({v for v in values if math.isfinite(v)})
    widest = max(b - a for a, b in itertools.pairwise(finite))
    limit = finite[-1]
    return Codec(name, bits, kind, limit, tuple(values), widest / 2 / limit, about)


def _signed(name: str, magnitudes: list[float], about: str) -> Codec:
    return _codec(name, 4, "signed", [*magnitudes, *(-m for m in magnitudes)], about)


def _integer(bits: int) -> Codec:
    """Two's complement: the code of k is k modulo 2^bits, so a zero byte is a zero. -2^(bits-1) is never written."""
    top = 2 ** (bits - 1) - 1
    values = [float(k if k <= top else k - 2**bits) for k in range(2**bits)]
    values[top + 1] = -float(top)  # the code that is never written: keeps the grid symmetric
    return _codec(f"int{bits}", bits, "integer", values, f"whole multiples of 1/{top}")


def _float8(name: str, dtype: torch.dtype) -> Codec:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    return _codec(name, 8, "float8", values, f"8-bit float, {name}, the largest scaled to {torch.finfo(dtype).max:g}")


def _float32(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


def dynamic_map() -> list[float]:
    """The 256 values of the signed dynamic 8-bit code, ascending.

    For i = 0..6 the midpoints of [0.1, 1] cut into 2^i equal parts, times 10^(i - 6), with both signs; and 0 and 1.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1.0, 2**i + 1, dtype=torch.float32)
        for v in (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist():
            values += [v, -v]
    return sorted(values)


# Quantiles of the normal distribution, each tail's area cut evenly and scaled to 1, as published with QLoRA.
_NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
# Magnitudes by code. FP4's are not ascending: the code's bits are those of bitsandbytes.
_FP4 = _float32([0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_E2M1 = _float32([0.0, 1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0])

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            _signed("fp4", _FP4, "the FP4 of bitsandbytes: 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1 and negatives"),
            _signed("e2m1", _E2M1, "OCP E2M1: 0, 1/12, 1/6, 1/4, 1/3, 1/2, 2/3, 1 and negatives"),
            _codec("nf4", 4, "table", _NF4, "quantiles of the normal distribution"),
            _integer(4),
            _codec("int4_minmax", 4, "minmax", [float(k) for k in range(16)], "16 even steps from smallest to largest"),
            _integer(5),
            _integer(6),
            _integer(8),
            _codec("dynamic8", 8, "table", dynamic_map(), "the signed dynamic map of bitsandbytes: seven decades"),
            _float8("e4m3", torch.float8_e4m3fn),
            _float8("e5m2", torch.float8_e5m2),
        )
    }
)


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ValueError: no such codec; the message lists the names.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is not one of {', '.join(CODECS)}")
    return CODECS[name]


@dataclass(frozen=True)
class Tables:
    """A codec's tables on one device, float32.

    Attributes:
        values: value by code; codes without a finite value hold NaN.
        sorted: what is searched, ascending: all values, or the magnitudes if the code has a sign bit. The code of the
            r-th is r, but for FP4's, where bit 2 is flipped if bit 1 is set.
        midpoints: between neighbours of ``sorted``; a number on a midpoint takes the lower rank.
        first: uint8, by the upper 16 bits of a float32 (plus 2^15 as a signed number): the lowest rank of a number
            that begins so.
        next: float32, likewise: the midpoint from which on it is one more; there is never a second one.
    """

    values: Tensor
    sorted: Tensor
    midpoints: Tensor
    first: Tensor
    next: Tensor


@lru_cache(maxsize=64)
def tables(name: str, device: torch.device) -> Tables:
    """Tables of a codec on ``device``, made once."""
    codec = get_codec(name)
    values = torch.tensor(codec.values, dtype=torch.float32)
    values = torch.where(values.isfinite(), values, torch.nan)
    wanted = values[: len(values) // 2] if codec.kind in ("signed", "float8") else values
    ranked = wanted[wanted.isfinite()].sort().values
    midpoints = (ranked[:-1] + ranked[1:]) / 2
    made = values, ranked, midpoints, *_by_upper_bits(name, midpoints)
    return Tables(*(table.to(device) for table in made))


def _by_upper_bits(name: str, midpoints: Tensor) -> tuple[Tensor, Tensor]:
    """``first`` and ``next`` of :class:`Tables`."""
    low = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    ends = torch.stack((low.view(torch.float32), (low | 0xFFFF).view(torch.float32)))
    ends[:, ~ends.isfinite().all(0)] = 0.0  # never asked for
    lowest, highest = torch.bucketize(ends.amin(0), midpoints), torch.bucketize(ends.amax(0), midpoints)
    if int((highest - lowest).max()) > 1:
        raise ValueError(f"two midpoints of {name} share their upper 16 bits: it cannot be looked up by them")
    above = torch.cat((midpoints, midpoints.new_tensor([math.inf])))
    return lowest.to(torch.uint8), above[lowest]
