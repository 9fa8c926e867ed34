"""Triton kernels: RMSNorm and quantise in one read, and the backward pass of the norm from the codes in one pass.

Forward: a row is read once; its norm, the factor 1/RMS and the codes of the *unquantised* row are written. Backward:
the codes are read instead of the row; the norm's output is rebuilt (for the weight gradients of the products that it
feeds) and the gradients of row and gain are computed, with no tensor in between. A program holds a row as
[BLOCKS, BLOCK].
"""

import torch
import triton
import triton.language as tl

from dist_lib.kernels.block_codes import decode, encode, from_float, load_codes, store_codes, to_float
from dist_lib.kernels.quantize import constants


@triton.jit
def norm_quantize_kernel(
    x_ptr,
    gain_ptr,
    y_ptr,
    factor_ptr,
    codes_ptr,
    scales_ptr,
    ranked_ptr,
    midpoints_ptr,
    count,
    per_row,
    row_bytes,
    eps,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEVELS: tl.constexpr,
    FP4: tl.constexpr,
    HALF: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    keep = block < per_row
    length = tl.minimum(count - block * BLOCK, BLOCK).to(tl.int32)
    column = tl.arange(0, BLOCK)[None, :]
    valid = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
    place = block[:, None] * BLOCK + column
    x = to_float(tl.load(x_ptr + row * count + place, mask=valid, other=0.0))
    factor = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, axis=1), axis=0) / count + eps)
    tl.store(factor_ptr + row, factor)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    normal = to_float(from_float(x * factor, dtype, INTERPRETED))  # rounded before the gain, as the plain norm does
    gain = to_float(tl.load(gain_ptr + place, mask=valid, other=0.0))
    tl.store(y_ptr + row * count + place, from_float(normal * gain, dtype, INTERPRETED), mask=valid)
    codes, scale, _ = encode(x, valid, x, ranked_ptr, midpoints_ptr, KIND, BITS, LIMIT, LEVELS, FP4, HALF, False)
    start = row * row_bytes + block * (BLOCK * BITS // 8)
    store_codes(codes, start, length, keep, codes_ptr, BITS, BLOCK, EVEN)
    tl.store(scales_ptr + row * per_row + block, scale.to(scales_ptr.dtype.element_ty), mask=keep)


@triton.jit
def norm_backward_kernel(
    codes_ptr,
    scales_ptr,
    factor_ptr,
    gain_ptr,
    grad_ptr,
    values_ptr,
    y_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    count,
    per_row,
    row_bytes,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Every ``programs``-th row; grid (programs,). Gradients of the gain are summed per program."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    block = tl.arange(0, BLOCKS)
    keep = block < per_row
    length = tl.minimum(count - block * BLOCK, BLOCK).to(tl.int32)
    column = tl.arange(0, BLOCK)[None, :]
    valid = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
    place = block[:, None] * BLOCK + column
    gain = to_float(tl.load(gain_ptr + place, mask=valid, other=0.0))
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    grad_gain = tl.zeros((BLOCKS, BLOCK), tl.float32)
    row = program.to(tl.int64)
    for _ in range(program, rows, programs):
        codes = load_codes(
            codes_ptr, row * row_bytes + block * (BLOCK * BITS // 8), length, keep, BITS, BLOCK, EVEN, BLOCKS
        )
        scale = tl.load(scales_ptr + row * per_row + block, mask=keep, other=0.0).to(tl.float32)
        normal = decode(codes, scale, scale, values_ptr, KIND, BITS, LIMIT) * tl.load(factor_ptr + row)
        normal = tl.where(valid, normal, 0.0)
        rebuilt = to_float(from_float(normal, dtype, INTERPRETED)) * gain
        tl.store(y_ptr + row * count + place, from_float(rebuilt, dtype, INTERPRETED), mask=valid)
        grad = to_float(tl.load(grad_ptr + row * count + place, mask=valid, other=0.0))
        grad_gain += grad * normal
        inner = grad * gain
        mean = tl.sum(tl.sum(inner * normal, axis=1), axis=0) / count
        grad_x = tl.load(factor_ptr + row) * (inner - normal * mean)
        tl.store(grad_x_ptr + row * count + place, from_float(grad_x, dtype, INTERPRETED), mask=valid)
        row += programs
    tl.store(partial_ptr + program.to(tl.int64) * count + place, grad_gain, mask=valid)


def _tile(count: int, per_row: int, block_size: int) -> tuple[dict, int]:
    blocks = triton.next_power_of_2(per_row)
    constant = {"EVEN": count % block_size == 0, "BLOCKS": blocks, "BLOCK": block_size}
    return constant, min(max(blocks * block_size // 1024, 4), 16)


def norm_quantize_launch(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    y: torch.Tensor,
    factor: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    codec,
    table,
    block_size: int,
    *,
    interpreted: bool = False,
) -> None:
    """Fill ``y`` with the norm of ``x``, ``factor`` with 1/RMS, ``codes`` and ``scales`` with ``x`` quantised.

    Args:
        x: (rows, numbers), contiguous, not empty; ``y`` alike.
        gain: (numbers,).
        eps: added to the mean square.
        factor: float32 (rows,).
        codes, scales, codec, table, block_size, interpreted: as :func:`dist_lib.kernels.quantize.quantize_launch`; one
            scale a block.
    """
    kernel = norm_quantize_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(kernel)
    rows, count = x.shape
    constant, warps = _tile(count, scales.shape[1], block_size)
    kernel[(rows,)](
        x,
        gain,
        y,
        factor,
        codes,
        scales,
        table.sorted,
        table.midpoints,
        count,
        scales.shape[1],
        codes.shape[1],
        eps,
        **constants(codec, table),
        **constant,
        HALF=scales.dtype == torch.float16,
        INTERPRETED=interpreted,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def norm_backward_launch(
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: torch.Tensor,
    gain: torch.Tensor,
    grad: torch.Tensor,
    y: torch.Tensor,
    grad_x: torch.Tensor,
    codec,
    table,
    block_size: int,
    *,
    programs: int,
    interpreted: bool = False,
) -> torch.Tensor:
    """Fill ``y`` with the rebuilt norm and ``grad_x`` with the gradient of the row; returns the gain's, float32.

    Args:
        codes, scales, factor: as the forward kernel left them.
        gain: (numbers,).
        grad: gradient of the norm's output, (rows, numbers), contiguous.
        y, grad_x: like ``grad``.
        programs: how many share the rows; their sums of the gain's gradient are added afterwards.
        codec, table, block_size, interpreted: as above.
    """
    kernel = norm_backward_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(kernel)
    rows, count = grad.shape
    programs = min(programs, rows)
    partial = torch.empty(programs, count, dtype=torch.float32, device=grad.device)
    constant, warps = _tile(count, scales.shape[1], block_size)
    known = {key: value for key, value in constants(codec, table).items() if key in ("KIND", "BITS", "LIMIT")}
    kernel[(programs,)](
        codes,
        scales,
        factor,
        gain,
        grad,
        table.values,
        y,
        grad_x,
        partial,
        rows,
        count,
        scales.shape[1],
        codes.shape[1],
        **known,
        **constant,
        INTERPRETED=interpreted,
        num_warps=warps,
    )
    return partial.sum(dim=0)
