"""Triton kernels: quantise, dequantise, and add into an 8-bit sum, each in one pass over memory.

A program holds a tile of whole blocks, [ROWS, BLOCK]. Blocks are counted over all rows of the tensor; where a row is
not a whole number of blocks, its last one is short. Offsets are 64-bit. The arithmetic is in
:mod:`dist_lib.kernels.block_codes`.
"""

import torch
import triton
import triton.language as tl

from dist_lib.kernels.block_codes import decode, encode, from_float, load_codes, store_codes, to_float, uniform

TILE = 4096  # numbers in a tile: 32 a thread, so that each has four 16-byte loads of bfloat16 under way

# A product fused with a sum would be rounded once where the reference rounds twice.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def locate(
    program,
    blocks,
    count,
    per_row,
    row_bytes,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Of the blocks of a program: index, whether it exists, first number, first byte, numbers in it."""
    index = program * ROWS + tl.arange(0, ROWS).to(tl.int64)
    keep = index < blocks
    if EVEN:
        return index, keep, index * BLOCK, index * (BLOCK * BITS // 8), tl.full((ROWS,), BLOCK, tl.int32)
    row = index // per_row
    block = index % per_row
    length = tl.minimum(count - block * BLOCK, BLOCK).to(tl.int32)
    return index, keep, row * count + block * BLOCK, row * row_bytes + block * (BLOCK * BITS // 8), length


@triton.jit(do_not_specialize=["first", "seed"])
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    ranked_ptr,
    midpoints_ptr,
    values_ptr,
    blocks,
    count,
    per_row,
    row_bytes,
    first,
    seed,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEVELS: tl.constexpr,
    FP4: tl.constexpr,
    HALF: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode a tile; with ACCUMULATE add it to what is stored there first."""
    program = tl.program_id(0).to(tl.int64)
    index, keep, start, byte, length = locate(program, blocks, count, per_row, row_bytes, BLOCK, BITS, ROWS, EVEN)
    column = tl.arange(0, BLOCK)[None, :]
    valid = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
    x = to_float(tl.load(x_ptr + start[:, None] + column, mask=valid, other=0.0))
    if ACCUMULATE:
        old = load_codes(codes_ptr, byte, length, keep, BITS, BLOCK, EVEN, ROWS)
        old_scale = tl.load(scales_ptr + index, mask=keep, other=0.0).to(tl.float32)
        x = decode(old, old_scale, old_scale, values_ptr, KIND, BITS, LIMIT) + x
        x = tl.where(valid, x, 0.0)
    noise = x
    if STOCHASTIC:
        noise = uniform(seed, first + start[:, None] + column)
    codes, scale, second = encode(
        x, valid, noise, ranked_ptr, midpoints_ptr, KIND, BITS, LIMIT, LEVELS, FP4, HALF, STOCHASTIC
    )
    store_codes(codes, byte, length, keep, codes_ptr, BITS, BLOCK, EVEN)
    if KIND == "minmax":
        tl.store(scales_ptr + index * 2, scale.to(scales_ptr.dtype.element_ty), mask=keep)
        tl.store(scales_ptr + index * 2 + 1, second.to(scales_ptr.dtype.element_ty), mask=keep)
    else:
        tl.store(scales_ptr + index, scale.to(scales_ptr.dtype.element_ty), mask=keep)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    values_ptr,
    blocks,
    count,
    per_row,
    row_bytes,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Decode a tile."""
    program = tl.program_id(0).to(tl.int64)
    index, keep, start, byte, length = locate(program, blocks, count, per_row, row_bytes, BLOCK, BITS, ROWS, EVEN)
    column = tl.arange(0, BLOCK)[None, :]
    codes = load_codes(codes_ptr, byte, length, keep, BITS, BLOCK, EVEN, ROWS)
    if KIND == "minmax":
        scale = tl.load(scales_ptr + index * 2, mask=keep, other=0.0).to(tl.float32)
        second = tl.load(scales_ptr + index * 2 + 1, mask=keep, other=0.0).to(tl.float32)
    else:
        scale = tl.load(scales_ptr + index, mask=keep, other=0.0).to(tl.float32)
        second = scale
    numbers = decode(codes, scale, second, values_ptr, KIND, BITS, LIMIT)
    mask = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
    numbers = from_float(numbers, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + start[:, None] + column, numbers, mask=mask)


def constants(codec, table) -> dict[str, object]:
    """What the kernels are compiled for, of a codec and its tables (of :mod:`dist_lib.ops.codecs`)."""
    return {
        "KIND": codec.kind,
        "BITS": codec.bits,
        "LIMIT": codec.limit,
        "LEVELS": table.sorted.numel(),
        "FP4": codec.name == "fp4",
    }


def _parts(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block_size: int, bits: int) -> list[tuple]:
    """(numbers, codes, scales, index of the first number) to launch on.

    A single long row is split into its whole blocks, which need no masks, and its short last one.
    """
    rows, count = x.shape
    whole = count // block_size
    if rows > 1 or whole == 0 or count % block_size == 0:
        return [(x, codes, scales, 0)]
    numbers, width = whole * block_size, whole * block_size * bits // 8
    return [
        (x[:, :numbers], codes[:, :width], scales[:, :whole], 0),
        (x[:, numbers:], codes[:, width:], scales[:, whole:], numbers),
    ]


def _shape(x: torch.Tensor, codes: torch.Tensor, block_size: int, tile: int) -> tuple[tuple[int], tuple, dict]:
    """Grid, the four sizes, and the tile's constants."""
    rows, count = x.shape
    per_row = triton.cdiv(count, block_size)
    blocks = rows * per_row
    held = max(min(tile // block_size, triton.next_power_of_2(blocks)), 1)
    sizes = (blocks, count, per_row, codes.shape[1])
    return (triton.cdiv(blocks, held),), sizes, {"EVEN": count % block_size == 0, "ROWS": held, "BLOCK": block_size}


def quantize_launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    codec,
    table,
    block_size: int,
    seed: int,
    *,
    accumulate: bool = False,
    interpreted: bool = False,
    tile: int = TILE,
) -> None:
    """Fill ``codes`` and ``scales`` with the blocks of ``x``; or add ``x`` to what they hold.

    Args:
        x: (rows, numbers), not empty; float32, float16 or bfloat16.
        codes: uint8 (rows, bytes of a row), contiguous.
        scales: float32 or float16 (rows, blocks[, 2]), contiguous.
        codec, table: a codec and its tables on the device.
        block_size: numbers in a block, a power of two.
        seed: of stochastic rounding; -1 for nearest.
        accumulate: add to the sum that is there (not for ``int4_minmax``).
        interpreted: for tests: run on CPU tensors through Triton's interpreter.
        tile: numbers a program holds.
    """
    kernel = quantize_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(quantize_kernel)
    for part, part_codes, part_scales, first in _parts(x.contiguous(), codes, scales, block_size, codec.bits):
        grid, sizes, constant = _shape(part, part_codes, block_size, tile)
        kernel[grid](
            part,
            part_codes,
            part_scales,
            table.sorted,
            table.midpoints,
            table.values,
            *sizes,
            first,
            seed,
            **constants(codec, table),
            **constant,
            HALF=scales.dtype == torch.float16,
            STOCHASTIC=seed >= 0,
            ACCUMULATE=accumulate,
            **OPTIONS,
        )


def dequantize_launch(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    codec,
    table,
    block_size: int,
    *,
    interpreted: bool = False,
    tile: int = TILE,
) -> None:
    """Fill ``out`` (rows, numbers) with what ``codes`` and ``scales`` stand for; arguments as above."""
    kernel = dequantize_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(dequantize_kernel)
    known = {key: value for key, value in constants(codec, table).items() if key in ("KIND", "BITS", "LIMIT")}
    for part, part_codes, part_scales, _ in _parts(out, codes, scales, block_size, codec.bits):
        grid, sizes, constant = _shape(part, part_codes, block_size, tile)
        kernel[grid](
            part_codes,
            part_scales,
            part,
            table.values,
            *sizes,
            **known,
            **constant,
            INTERPRETED=interpreted,
            **OPTIONS,
        )
