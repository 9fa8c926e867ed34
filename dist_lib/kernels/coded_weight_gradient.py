"""Triton kernel: the gradient of a weight, ``grad^T x``, where ``x`` is stored in codes and decoded inside the product.

A program owns some outputs and one column of blocks, and walks over the tokens: it loads the codes of as many rows,
decodes them in registers to the dtype of ``grad``, and multiplies. So ``x`` is never written out; but every program
along the outputs decodes the same codes again. Whether that wins against decoding once and multiplying apart depends
on the shape and has to be timed.
"""

import torch
import triton
import triton.language as tl

from dist_lib.kernels.block_codes import decode, from_float, load_codes, to_float
from dist_lib.kernels.quantize import constants


@triton.jit
def weight_gradient_kernel(
    grad_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    values_ptr,
    tokens,
    outputs,
    count,
    per_row,
    row_bytes,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles of outputs, blocks of a row): the gradient of OUTPUTS x BLOCK weights."""
    block = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, BLOCK)
    left = tl.minimum(count - block * BLOCK, BLOCK).to(tl.int32)
    length = tl.zeros((ROWS,), tl.int32) + (BLOCK if EVEN else left)
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    acc = tl.full((OUTPUTS, BLOCK), 0.0, dtype=tl.float32)
    for first in range(0, tokens, ROWS):
        token = first + tl.arange(0, ROWS).to(tl.int64)
        keep = token < tokens
        place = token[:, None] * outputs + output[None, :]
        grad = tl.load(grad_ptr + place, mask=keep[:, None] & (output[None, :] < outputs), other=0.0)
        byte = token * row_bytes + block * (BLOCK * BITS // 8)
        codes = load_codes(codes_ptr, byte, length, keep, BITS, BLOCK, EVEN, ROWS)
        scale = tl.load(scales_ptr + token * per_row + block, mask=keep, other=0.0).to(tl.float32)
        x = from_float(decode(codes, scale, scale, values_ptr, KIND, BITS, LIMIT), dtype, INTERPRETED)
        if INTERPRETED:  # it multiplies bfloat16 as raw bits
            acc = tl.dot(tl.trans(to_float(grad)), to_float(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(tl.trans(grad), x, acc, input_precision="ieee")
    out = from_float(acc, out_ptr.dtype.element_ty, INTERPRETED)
    inside = (output[:, None] < outputs) & (column[None, :] < left)
    tl.store(out_ptr + output[:, None].to(tl.int64) * count + block * BLOCK + column[None, :], out, mask=inside)


def weight_gradient_launch(
    grad: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    codec,
    table,
    block_size: int,
    *,
    interpreted: bool = False,
    rows: int = 64,
    outputs: int = 128,
) -> None:
    """Fill ``out`` (outputs, numbers) with ``grad^T x``.

    Args:
        grad: (tokens, outputs), contiguous; float32, float16 or bfloat16.
        codes, scales: of ``x`` (tokens, numbers), as of :func:`dist_lib.kernels.quantize.quantize_launch`, one scale a
            block.
        out: contiguous, in a dtype of those.
        codec, table, block_size, interpreted: as there.
        rows: tokens multiplied at a time, at least 16.
        outputs: weights of a program along the outputs, at least 16.
    """
    kernel = weight_gradient_kernel
    if interpreted:
        from dist_lib.kernels.interpreter import Interpreted

        kernel = Interpreted(kernel)
    count = out.shape[1]
    per_row = triton.cdiv(count, block_size)
    known = {key: value for key, value in constants(codec, table).items() if key in ("KIND", "BITS", "LIMIT")}
    kernel[(triton.cdiv(out.shape[0], outputs), per_row)](
        grad,
        codes,
        scales,
        out,
        table.values,
        grad.shape[0],
        out.shape[0],
        count,
        per_row,
        codes.shape[1],
        **known,
        EVEN=count % block_size == 0,
        ROWS=rows,
        OUTPUTS=outputs,
        BLOCK=block_size,
        INTERPRETED=interpreted,
        num_warps=8,
    )
