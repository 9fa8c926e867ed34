"""Triton helpers that encode and decode tiles of blocks, shared by the kernels that quantise.

A tile is [blocks, numbers of a block] in float32. Every step repeats one step of the reference, in the same order and
with one rounding, so that codes and scales agree bit for bit. What may not be changed: the largest magnitude is a
maximum of *integers*, for ``tl.max`` drops NaN; divisions are ``div_rn``; a product that is added to something must not
be fused with the addition (the launchers switch that off).
"""

import triton
import triton.language as tl

ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
ROUNDER_BITS: tl.constexpr = tl.constexpr(0x4B400000)
INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def to_float(x):
    """float32 of any float; bfloat16 by its bits, which is exact in the interpreter too."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def from_float(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 rounded to ``dtype``; the interpreter would truncate to bfloat16, so there it is done on the bits."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def uniform(seed, index):
    """The numbers ``index`` (int64) of the stream ``seed``, in [0, 1)."""
    seed = seed.to(tl.int64)
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = ((index >> 32) * 0x9E3779B9 & 0xFFFFFFFF).to(tl.uint32)
    h = _mix(low ^ (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h ^ (high + (seed >> 32).to(tl.uint32)))
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def largest(x):
    """Largest magnitude of each block of [blocks, numbers]; NaN if one is NaN or infinite."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    return tl.where(bits >= INFINITY_BITS, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def stored(scale, HALF: tl.constexpr):
    """A scale as stored, in float32: what float16 makes of it, never infinite."""
    if HALF:
        scale = tl.where(scale > 0.0, tl.maximum(scale, 6.103515625e-05), scale).to(tl.float16).to(tl.float32)
    return tl.where(scale < float("inf"), scale, float("nan"))


@triton.jit
def to_grid(x, scale, LIMIT: tl.constexpr):
    """``x * LIMIT / scale``; anything in a NaN block. At most a rounding error beyond LIMIT, and 2^-11 with float16."""
    factor = tl.div_rn(tl.zeros_like(scale) + LIMIT, tl.where(scale > 0.0, scale, 1.0))
    return x * tl.minimum(factor, 1.7014118346046923e38)[:, None]


@triton.jit
def nearest(y):
    """The nearest integer (ties to even) as int32, |y| < 2^22: the low bits of ``y + 1.5 * 2^23``."""
    return (y + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS


@triton.jit
def whole(code):
    """float32 of an int32 in 0 ... 2^23 - 1, set into the mantissa: conversions run at a quarter of the rate."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def round_integer(y, noise, STOCHASTIC: tl.constexpr):
    """To a neighbouring integer, as int32."""
    if STOCHASTIC:
        floor = tl.floor(y)
        rounded = (floor + tl.where(noise < y - floor, 1.0, 0.0)).to(tl.int32)
    else:
        rounded = nearest(y)
    return rounded


@triton.jit
def _count(y, table, COUNT: tl.constexpr, EQUAL: tl.constexpr):
    """How many of the ``COUNT`` ascending numbers at ``table`` are below ``y`` (or equal, if EQUAL)."""
    rank = tl.zeros_like(y).to(tl.int32)
    for k in tl.static_range(8):
        if (128 >> k) <= COUNT:
            at = rank + ((128 >> k) - 1)
            value = tl.load(table + at, mask=at < COUNT, other=float("inf"))
            rank += tl.where((y >= value) if EQUAL else (y > value), 128 >> k, 0)
    return rank


@triton.jit
def find_rank(y, noise, ranked, midpoints, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Position of ``y`` in the ascending table ``ranked`` of LEVELS numbers: the nearest, or a neighbour by chance."""
    if STOCHASTIC:
        below = _count(y, ranked + 1, LEVELS - 2, True)
        low = tl.load(ranked + below)
        high = tl.load(ranked + below + 1)
        rank = below + tl.where(noise * (high - low) < y - low, 1, 0)
    elif LEVELS == 8:  # three comparisons with numbers that all lanes share
        upper = y > tl.load(midpoints + 3)
        middle = y > tl.where(upper, tl.load(midpoints + 5), tl.load(midpoints + 1))
        above = tl.where(middle, tl.load(midpoints + 6), tl.load(midpoints + 4))
        below_ = tl.where(middle, tl.load(midpoints + 2), tl.load(midpoints + 0))
        rank = tl.where(y > tl.where(upper, above, below_), 1, 0) + tl.where(middle, 2, 0) + tl.where(upper, 4, 0)
    else:
        rank = _count(y, midpoints, LEVELS - 1, False)
    return rank


@triton.jit
def float8_code(magnitude, MANTISSA: tl.constexpr):
    """Code of the nearest 8-bit float (ties to even) of a magnitude within its range."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    steps: tl.constexpr = 512.0 if MANTISSA == 3 else 65536.0
    smallest: tl.constexpr = 0.015625 if MANTISSA == 3 else 6.103515625e-05
    subnormal = nearest(magnitude * steps)
    return tl.where(magnitude < smallest, subnormal, normal)


@triton.jit
def encode(
    x,
    valid,
    noise,
    ranked,
    midpoints,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEVELS: tl.constexpr,
    FP4: tl.constexpr,
    HALF: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes (int32; 0 where not ``valid`` and in NaN blocks), scale and second scale of blocks.

    ``x`` is 0 where not ``valid``. The second scale is the scale again, but for minmax the smallest number.
    """
    if KIND == "minmax":
        low = tl.min(tl.where(valid, x, float("inf")), axis=1)
        high = tl.max(tl.where(valid, x, float("-inf")), axis=1)
        scale = tl.div_rn(high - low, tl.zeros_like(low) + LIMIT)
        top = largest(x)
        scale = stored(tl.where(top == top, scale, float("nan")), HALF)
        if HALF:
            low = low.to(tl.float16).to(tl.float32)
        good = (scale == scale) & (tl.abs(low) < float("inf"))
        scale = tl.where(good, scale, float("nan"))
        second = tl.where(good, low, float("nan"))
        y = tl.minimum(tl.maximum(to_grid(x - second[:, None], scale, 1.0), 0.0), LIMIT)
        codes = round_integer(y, noise, STOCHASTIC)
    else:
        scale = stored(largest(x), HALF)
        second = scale
        y = to_grid(x, scale, LIMIT)
        if STOCHASTIC:
            y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
        if KIND == "integer":
            codes = round_integer(y, noise, STOCHASTIC) & ((1 << BITS) - 1)
        elif KIND == "table":
            codes = find_rank(y, noise, ranked, midpoints, LEVELS, STOCHASTIC)
        else:
            if KIND == "float8" and not STOCHASTIC:
                codes = float8_code(tl.abs(y), 3 if LIMIT < 1000.0 else 2)
            else:
                codes = find_rank(tl.abs(y), noise, ranked, midpoints, LEVELS, STOCHASTIC)
            if FP4:
                codes = codes ^ ((codes & 2) << 1)
            sign: tl.constexpr = 1 << (BITS - 1)
            codes = codes | ((y.to(tl.int32, bitcast=True) >> (32 - BITS)) & sign)
    return tl.where(valid & (scale == scale)[:, None], codes, 0), scale, second


@triton.jit
def decode(codes, scale, second, values, KIND: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """float32 numbers of codes (int32) [blocks, numbers]."""
    if KIND == "minmax":
        return whole(codes) * scale[:, None] + second[:, None]
    if KIND == "integer":
        half: tl.constexpr = 1 << (BITS - 1)
        grid = whole(codes ^ half) - half
    else:
        grid = tl.load(values + codes)
    step = tl.div_rn(scale, tl.zeros_like(scale) + LIMIT)
    return grid * step[:, None]


@triton.jit
def store_codes(codes, start, length, keep, out, BITS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Pack codes [blocks, BLOCK] and store each block at ``out + start``: planes as in the reference.

    ``length``: numbers in each block (all BLOCK if EVEN); ``keep``: which blocks exist.
    """
    rows: tl.constexpr = codes.shape[0]
    if BITS == 8:
        column = tl.arange(0, BLOCK)[None, :]
        mask = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
        tl.store(out + start[:, None] + column, codes.to(tl.uint8), mask=mask)
    else:
        high: tl.constexpr = BITS - 4
        even, odd = tl.split(tl.reshape(codes & 15, (rows, BLOCK // 2, 2)))
        column = tl.arange(0, BLOCK // 2)[None, :]
        low_bytes = (length + 1) // 2
        mask = keep[:, None] if EVEN else keep[:, None] & (column < low_bytes[:, None])
        tl.store(out + start[:, None] + column, ((even << 4) | odd).to(tl.uint8), mask=mask)
        if high > 0:
            group: tl.constexpr = 8 // high
            parts = tl.reshape(codes >> 4, (rows, BLOCK // group, group))
            plane = tl.sum(parts << (tl.arange(0, group) * high)[None, None, :], axis=2)
            column = tl.arange(0, BLOCK // group)[None, :]
            mask = keep[:, None] if EVEN else keep[:, None] & (column < ((length * high + 7) // 8)[:, None])
            tl.store(out + (start + low_bytes)[:, None] + column, plane.to(tl.uint8), mask=mask)


@triton.jit
def load_codes(
    source, start, length, keep, BITS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr
):
    """Codes (int32) [ROWS, BLOCK] of the blocks at ``source + start``; 0 where there are none."""
    if BITS == 8:
        column = tl.arange(0, BLOCK)[None, :]
        mask = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
        return tl.load(source + start[:, None] + column, mask=mask, other=0).to(tl.int32)
    high: tl.constexpr = BITS - 4
    column = tl.arange(0, BLOCK // 2)[None, :]
    low_bytes = (length + 1) // 2
    mask = keep[:, None] if EVEN else keep[:, None] & (column < low_bytes[:, None])
    pairs = tl.load(source + start[:, None] + column, mask=mask, other=0)
    codes = tl.reshape(tl.join(pairs >> 4, pairs & 15), (ROWS, BLOCK)).to(tl.int32)
    if high > 0:
        group: tl.constexpr = 8 // high
        column = tl.arange(0, BLOCK // group)[None, :]
        mask = keep[:, None] if EVEN else keep[:, None] & (column < ((length * high + 7) // 8)[:, None])
        plane = tl.load(source + (start + low_bytes)[:, None] + column, mask=mask, other=0).to(tl.int32)
        parts = (plane[:, :, None] >> (tl.arange(0, group) * high)[None, None, :]) & ((1 << high) - 1)
        codes = codes | (tl.reshape(parts, (ROWS, BLOCK)) << 4)
    return codes
