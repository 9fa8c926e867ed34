"""Triton kernels: ``silu(gate) * up`` that also encodes gate and up, and its backward pass from those codes.

Forward: two numbers a channel are read once; the product and two codes are written. Backward: reads two codes and one
gradient a channel, writes the two gradients and the rebuilt product (which the weight gradient of the next product
needs): about 9 bytes in bfloat16 with 4-bit codes, where decode and backward apart move 17.
"""

import torch
import triton
import triton.language as tl

from dist_lib.kernels.block_codes import decode, encode, from_float, load_codes, store_codes, to_float
from dist_lib.kernels.quantize import OPTIONS, constants, locate


@triton.jit
def swiglu_backward_kernel(
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    grad_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    product_ptr,
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
    """A tile of whole blocks."""
    program = tl.program_id(0).to(tl.int64)
    index, keep, start, byte, length = locate(program, blocks, count, per_row, row_bytes, BLOCK, BITS, ROWS, EVEN)
    column = tl.arange(0, BLOCK)[None, :]
    mask = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
    place = start[:, None] + column
    gate_codes = load_codes(gate_ptr, byte, length, keep, BITS, BLOCK, EVEN, ROWS)
    up_codes = load_codes(up_ptr, byte, length, keep, BITS, BLOCK, EVEN, ROWS)
    gate_scale = tl.load(gate_scales_ptr + index, mask=keep, other=0.0).to(tl.float32)
    up_scale = tl.load(up_scales_ptr + index, mask=keep, other=0.0).to(tl.float32)
    gate = decode(gate_codes, gate_scale, gate_scale, values_ptr, KIND, BITS, LIMIT)
    up = decode(up_codes, up_scale, up_scale, values_ptr, KIND, BITS, LIMIT)
    grad = to_float(tl.load(grad_ptr + place, mask=mask, other=0.0))
    gated = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * gated
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    tl.store(product_ptr + place, from_float(silu * up, dtype, INTERPRETED), mask=mask)
    tl.store(grad_up_ptr + place, from_float(grad * silu, dtype, INTERPRETED), mask=mask)
    slope = gated + silu * (1.0 - gated)
    tl.store(grad_gate_ptr + place, from_float(grad * up * slope, dtype, INTERPRETED), mask=mask)


def swiglu_backward_launch(
    gate: tuple[torch.Tensor, torch.Tensor],
    up: tuple[torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
    product: torch.Tensor,
    codec,
    table,
    block_size: int,
    *,
    interpreted: bool = False,
    tile: int = 2048,
) -> None:
    """Fill ``grad_gate``, ``grad_up`` and ``product``, each (rows, numbers) like ``grad``, contiguous and not empty.

    Args:
        gate, up: (codes, scales) of :func:`dist_lib.kernels.quantize.quantize_launch`, one scale a block.
        grad: gradient of ``silu(gate) * up``.
        codec, table, block_size, interpreted, tile: as there.
    """
    kernel = swiglu_backward_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(kernel)
    rows, count = grad.shape
    per_row = triton.cdiv(count, block_size)
    blocks = rows * per_row
    held = max(min(tile // block_size, triton.next_power_of_2(blocks)), 1)
    known = {key: value for key, value in constants(codec, table).items() if key in ("KIND", "BITS", "LIMIT")}
    kernel[(triton.cdiv(blocks, held),)](
        *gate,
        *up,
        grad,
        grad_gate,
        grad_up,
        product,
        table.values,
        blocks,
        count,
        per_row,
        gate[0].shape[1],
        **known,
        EVEN=count % block_size == 0,
        ROWS=held,
        BLOCK=block_size,
        INTERPRETED=interpreted,
        num_warps=4,
    )


@triton.jit
def swiglu_quantize_kernel(
    gate_ptr,
    up_ptr,
    product_ptr,
    gate_codes_ptr,
    gate_scales_ptr,
    up_codes_ptr,
    up_scales_ptr,
    ranked_ptr,
    midpoints_ptr,
    blocks,
    count,
    per_row,
    row_bytes,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEVELS: tl.constexpr,
    FP4: tl.constexpr,
    HALF: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of whole blocks."""
    program = tl.program_id(0).to(tl.int64)
    index, keep, start, byte, length = locate(program, blocks, count, per_row, row_bytes, BLOCK, BITS, ROWS, EVEN)
    column = tl.arange(0, BLOCK)[None, :]
    mask = keep[:, None] if EVEN else keep[:, None] & (column < length[:, None])
    place = start[:, None] + column
    gate = to_float(tl.load(gate_ptr + place, mask=mask, other=0.0))
    up = to_float(tl.load(up_ptr + place, mask=mask, other=0.0))
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    silu = to_float(from_float(gate / (1.0 + tl.exp(-gate)), dtype, INTERPRETED))  # rounded, as torch stores it
    tl.store(product_ptr + place, from_float(silu * up, dtype, INTERPRETED), mask=mask)
    for which in tl.static_range(2):
        x = gate if which == 0 else up
        codes_ptr = gate_codes_ptr if which == 0 else up_codes_ptr
        scales_ptr = gate_scales_ptr if which == 0 else up_scales_ptr
        codes, scale, _ = encode(x, mask, x, ranked_ptr, midpoints_ptr, KIND, BITS, LIMIT, LEVELS, FP4, HALF, False)
        store_codes(codes, byte, length, keep, codes_ptr, BITS, BLOCK, EVEN)
        tl.store(scales_ptr + index, scale.to(scales_ptr.dtype.element_ty), mask=keep)


def swiglu_quantize_launch(
    gate: torch.Tensor,
    up: torch.Tensor,
    product: torch.Tensor,
    gate_coded: tuple[torch.Tensor, torch.Tensor],
    up_coded: tuple[torch.Tensor, torch.Tensor],
    codec,
    table,
    block_size: int,
    *,
    interpreted: bool = False,
    tile: int = 2048,
) -> None:
    """Fill ``product`` with ``silu(gate) * up``, and (codes, scales) of both.

    Args:
        gate, up, product: (rows, numbers), contiguous and not empty.
        gate_coded, up_coded: codes and scales to fill, as of :func:`dist_lib.kernels.quantize.quantize_launch`; one
            scale a block.
        codec, table, block_size, interpreted, tile: as there.
    """
    kernel = swiglu_quantize_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(kernel)
    rows, count = gate.shape
    per_row = triton.cdiv(count, block_size)
    blocks = rows * per_row
    held = max(min(tile // block_size, triton.next_power_of_2(blocks)), 1)
    kernel[(triton.cdiv(blocks, held),)](
        gate,
        up,
        product,
        *gate_coded,
        *up_coded,
        table.sorted,
        table.midpoints,
        blocks,
        count,
        per_row,
        gate_coded[0].shape[1],
        **constants(codec, table),
        HALF=gate_coded[1].dtype == torch.float16,
        EVEN=count % block_size == 0,
        ROWS=held,
        BLOCK=block_size,
        INTERPRETED=interpreted,
        **OPTIONS,
    )
