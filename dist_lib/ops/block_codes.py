"""Encode and decode blocks of numbers in plain torch: the definition that every kernel must reproduce bit for bit.

All arithmetic is float32. A block's scale is its largest magnitude. A NaN or an infinity makes the scale NaN, the codes
zero bytes and the whole block NaN after decoding: nothing that is not finite ever becomes a finite number. Zeros come
back as zeros (not from ``int4_minmax``, whose grid need not contain zero); formats with a sign bit keep the sign of
zero. Every step is one correctly rounded operation, so that the result does not depend on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_lib.ops.codecs import Codec, Tables, tables
from dist_lib.ops.packing import pack, unpack

# Largest factor that takes numbers to the grid: reached where 1 / scale would leave float32. Blocks whose largest
# magnitude is below about 1e-34 are therefore rounded towards zero, and may come back as zero.
MAX_FACTOR = 2.0**127
# Smallest float16 scale: its smallest normal number, for below it a float16 keeps fewer than 11 bits.
HALF_FLOOR = 2.0**-14


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive float32 scales as stored: rounded to ``dtype``; not finite becomes NaN, float16 starts at its floor."""
    if dtype == torch.float16:
        scale = torch.where(scale > 0, scale.clamp(min=HALF_FLOOR), scale)
    scale = scale.to(dtype)
    return torch.where(scale.isfinite(), scale, torch.nan)


def _over(x: Tensor, number: float) -> Tensor:
    """``x / number``, rounded once: on a GPU torch would multiply by the reciprocal of a plain number."""
    return x / torch.full_like(x, number)


def _to_grid(x: Tensor, scale: Tensor, limit: float, poison: float = 0.0) -> Tensor:
    """``x * limit / scale`` for blocks (..., n), scales (..., ): one reciprocal a block; ``poison`` in NaN blocks."""
    divisor = torch.where(scale > 0, scale.float(), 1.0)
    factor = torch.full_like(divisor, limit) / divisor  # not ``limit / divisor``: torch rounds that twice
    y = x * factor.clamp(max=MAX_FACTOR)[..., None]
    bad = scale.isnan()
    # A CPU can look whether there is such a block at all; a GPU would have to wait for the answer.
    return y if y.device.type == "cpu" and not bad.any() else y.masked_fill_(bad[..., None], poison)


def _round(y: Tensor, noise: Tensor | None) -> Tensor:
    """To a neighbouring integer: the nearest (ties to even), or the upper one with probability ``y - floor(y)``."""
    if noise is None:
        return y.round_()
    floor = y.floor()
    up: Tensor = noise < y - floor
    return floor.add_(up)


def _rank(y: Tensor, table: Tables, noise: Tensor | None) -> Tensor:
    """Positions in the ascending ``table.sorted`` of ``y`` within it: nearest, or at random between the neighbours."""
    ranked = table.sorted
    if noise is None and len(table.midpoints) < 16:  # a few comparisons are the fastest
        rank = torch.zeros_like(y, dtype=torch.uint8)
        for midpoint in table.midpoints.unbind():
            rank += y > midpoint
        return rank
    if noise is None:  # looking up by the upper bits is many times as fast as searching
        flat = y.contiguous().view(-1)
        upper = (flat.view(torch.int32) >> 16).add_(2**15)
        rank = table.first.index_select(0, upper)
        rank += flat > table.next.index_select(0, upper)
        return rank.view(y.shape)
    below: Tensor = (torch.bucketize(y, ranked, right=True) - 1).clamp_(0, len(ranked) - 2)
    low, high = ranked[below], ranked[below + 1]
    up: Tensor = noise * (high - low) < y - low
    below += up
    return below


def _codes(y: Tensor, codec: Codec, noise: Tensor | None) -> Tensor:
    """uint8 codes of numbers ``y`` in grid units, -limit ... limit."""
    if codec.kind == "integer":
        whole = _round(y, noise).to(torch.int8).view(torch.uint8)
        return whole if codec.bits == 8 else whole.bitwise_and_(2**codec.bits - 1)
    if codec.kind == "minmax":
        return _round(y, noise).to(torch.uint8)
    if codec.kind == "float8" and noise is None:
        return y.to(torch.float8_e4m3fn if codec.name == "e4m3" else torch.float8_e5m2).view(torch.uint8)
    table = tables(codec.name, y.device)
    if codec.kind == "table":
        signed_rank = _rank(y, table, noise)
        return signed_rank.to(torch.uint8)
    rank = _rank(y.abs(), table, noise).to(torch.uint8)
    if codec.name == "fp4":  # its code is the rank with bit 2 flipped where bit 1 is set
        rank ^= (rank & 2) << 1
    return rank | (y.signbit().to(torch.uint8) << (codec.bits - 1))


def encode(x: Tensor, codec: Codec, scale_dtype: torch.dtype, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode blocks.

    Args:
        x: float32 (..., n), n >= 1; each (n, ) is one block.
        codec: the format.
        scale_dtype: float32 or float16.
        noise: None for nearest rounding; or uniform numbers in [0, 1) like ``x`` for stochastic rounding.

    Returns:
        Packed codes, uint8 (..., packed_bytes(n)), and scales (...,), or (..., 2) for ``int4_minmax``: step, minimum.
    """
    if codec.kind == "minmax":
        low = x.amin(dim=-1)
        step = _stored(_over(x.amax(dim=-1) - low, codec.limit), scale_dtype)
        low = low.to(scale_dtype)
        good = step.isfinite() & low.isfinite()
        step, low = torch.where(good, step, torch.nan), torch.where(good, low, torch.nan)
        y = _to_grid(x - low.float()[..., None], step, 1.0).clamp_(0.0, codec.limit)
        return pack(_codes(y, codec, noise), codec.bits), torch.stack((step, low), dim=-1)
    scale = _stored(x.abs().amax(dim=-1), scale_dtype)
    zero_code = -codec.limit if codec.kind == "table" else 0.0
    y = _to_grid(x, scale, codec.limit, zero_code)
    if codec.kind != "integer" or noise is not None:  # an integer beyond the limit by a rounding error rounds to it
        y.clamp_(-codec.limit, codec.limit)
    return pack(_codes(y, codec, noise), codec.bits), scale


def decode(packed: Tensor, scales: Tensor, count: int, codec: Codec, out: Tensor | None = None) -> Tensor:
    """The inverse: packed codes (..., bytes) and scales of blocks of ``count`` numbers -> float32 (..., count).

    With ``out``, float32 (..., count) of any strides, the numbers are written there.
    """
    codes = unpack(packed, count, codec.bits)
    if codec.kind == "minmax":
        step, low = scales.float().unbind(-1)
        return torch.add(codes.float().mul_(step[..., None]), low[..., None], out=out)
    if codec.kind == "integer":
        half = 2 ** (codec.bits - 1)
        signed = codes.view(torch.int8) if codec.bits == 8 else (codes ^ half).to(torch.int8) - half
        grid = signed.float()
    else:
        grid = tables(codec.name, codes.device).values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return torch.mul(grid, _over(scales.float(), codec.limit)[..., None], out=out)
