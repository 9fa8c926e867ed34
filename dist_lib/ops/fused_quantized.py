"""RMSNorm and SwiGLU around stored codes: what a layer needs that keeps its activations quantised.

:func:`rms_norm_quantize` is RMSNorm that also encodes its input; :func:`rms_norm_backward` and :func:`swiglu_backward`
are the backward passes from codes, which also rebuild what the weight gradients need. Plain torch is the definition;
on CUDA a Triton kernel does each in one pass over memory. :func:`swiglu_quantize` and :func:`weight_gradient` have a
kernel too, which runs only where asked for: whether it wins has to be timed on the GPU at hand. Formulas: our
derivation; that the norm's output and the gated product are rebuilt and never stored is AGoQ's (arXiv 2605.00539,
layer-aware activation quantisation).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_lib.ops.codecs import CODECS, tables
from dist_lib.ops.quantization import (
    NEAREST,
    Quantized,
    as_rows,
    check_choice,
    empty_codes,
    quantize,
    quantize_uses_kernel,
    rounding_seed,
)

# Longest row that a program of the norm's kernels holds in registers.
LONGEST_ROW = 16384


def _one_row_fits(x: Tensor, codec: str) -> bool:
    return quantize_uses_kernel(x) and x.shape[1] <= LONGEST_ROW and CODECS[codec].scales_per_block == 1


@torch.library.custom_op("dist_lib::rms_norm_quantize", mutates_args=())
def _norm_quantize(
    x: Tensor, weight: Tensor, eps: float, codec: str, block_size: int, half_scales: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, 1/RMS, codes and scales of (rows, numbers)."""
    if x.numel() and seed == NEAREST and weight.dtype == x.dtype and _one_row_fits(x, codec):
        from dist_lib.kernels.fused_norm_quantize import norm_quantize_launch

        x = x.contiguous()
        y, factor, codes, scales = _norm_outputs(x, codec, block_size, half_scales)
        table = tables(codec, x.device)
        with torch.cuda.device_of(x):
            norm_quantize_launch(x, weight, eps, y, factor, codes, scales, CODECS[codec], table, block_size)
        return y, factor, codes, scales
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * (wide * factor).to(x.dtype)
    codes, scales = torch.ops.dist_lib.quantize_blocks(x, codec, block_size, half_scales, seed)
    return y, factor[:, 0].contiguous(), codes, scales


def _norm_outputs(x: Tensor, codec: str, block_size: int, half_scales: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scales = empty_codes(x, codec, block_size, torch.float16 if half_scales else torch.float32)
    return torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32), codes, scales


@_norm_quantize.register_fake
def _(
    x: Tensor, weight: Tensor, eps: float, codec: str, block_size: int, half_scales: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, *rest = _norm_outputs(x, codec, block_size, half_scales)
    return y.to(torch.promote_types(weight.dtype, x.dtype)), rest[0], rest[1], rest[2]


@torch.library.custom_op("dist_lib::rms_norm_backward", mutates_args=())
def _norm_backward(
    codes: Tensor, scales: Tensor, factor: Tensor, weight: Tensor, grad: Tensor, codec: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the input, of the weight (float32), and the output rebuilt; all from (rows, numbers)."""
    if grad.numel() and weight.dtype == grad.dtype and _one_row_fits(grad, codec):
        from dist_lib.kernels.fused_norm_quantize import norm_backward_launch

        grad = grad.contiguous()
        y, grad_x = torch.empty_like(grad), torch.empty_like(grad)
        programs = 2 * torch.cuda.get_device_properties(grad.device).multi_processor_count
        table = tables(codec, grad.device)
        with torch.cuda.device_of(grad):
            grad_weight = norm_backward_launch(
                codes, scales, factor, weight, grad, y, grad_x, CODECS[codec], table, block_size, programs=programs
            )
        return grad_x, grad_weight, y
    count = grad.shape[1]
    x = torch.ops.dist_lib.dequantize_blocks(codes, scales, count, codec, block_size, torch.float32)
    normal = x * factor[:, None]
    y = weight * normal.to(grad.dtype)
    wide = grad.float()
    inner = wide * weight.float()
    grad_x = factor[:, None] * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return grad_x.to(grad.dtype), (wide * normal).sum(0), y


@_norm_backward.register_fake
def _(
    codes: Tensor, scales: Tensor, factor: Tensor, weight: Tensor, grad: Tensor, codec: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(grad, dtype=torch.promote_types(weight.dtype, grad.dtype))
    return torch.empty_like(grad), grad.new_empty(grad.shape[1], dtype=torch.float32), y


@torch.library.custom_op("dist_lib::swiglu_backward", mutates_args=())
def _swiglu_backward(
    gate: Tensor, gate_scales: Tensor, up: Tensor, up_scales: Tensor, grad: Tensor, codec: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and the product rebuilt; all (rows, numbers) in the dtype of ``grad``."""
    if grad.numel() and quantize_uses_kernel(grad) and CODECS[codec].scales_per_block == 1:
        from dist_lib.kernels.fused_swiglu import swiglu_backward_launch

        grad = grad.contiguous()
        out = torch.empty_like(grad), torch.empty_like(grad), torch.empty_like(grad)
        table = tables(codec, grad.device)
        with torch.cuda.device_of(grad):
            swiglu_backward_launch((gate, gate_scales), (up, up_scales), grad, *out, CODECS[codec], table, block_size)
        return out
    count = grad.shape[1]
    g = torch.ops.dist_lib.dequantize_blocks(gate, gate_scales, count, codec, block_size, torch.float32)
    u = torch.ops.dist_lib.dequantize_blocks(up, up_scales, count, codec, block_size, torch.float32)
    gated = torch.sigmoid(g)
    silu, wide = g * gated, grad.float()
    grad_gate = wide * u * (gated + silu * (1.0 - gated))
    return grad_gate.to(grad.dtype), (wide * silu).to(grad.dtype), (silu * u).to(grad.dtype)


@_swiglu_backward.register_fake
def _(
    gate: Tensor, gate_scales: Tensor, up: Tensor, up_scales: Tensor, grad: Tensor, codec: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(grad), torch.empty_like(grad)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    codec: str = "fp4",
    block_size: int = 128,
    scale_dtype: torch.dtype = torch.float32,
    rounding: str = "nearest",
    generator: torch.Generator | int | None = None,
) -> tuple[Tensor, Tensor, Quantized]:
    """RMSNorm over the last dimension, and the input encoded, in one read of it. Not differentiable by itself.

    Args:
        x: (..., dim), float32, float16 or bfloat16.
        weight: (dim,).
        eps: added to the mean square.
        codec, block_size, scale_dtype, rounding, generator: as :func:`dist_lib.ops.quantize`.

    Returns:
        The output (..., dim), computed from ``x`` as it is; 1/RMS, float32 (rows,); the codes of ``x``.

    Raises:
        ValueError, TypeError: as :func:`dist_lib.ops.quantize`.
    """
    check_choice(codec, block_size, scale_dtype)
    rows = x.detach().reshape(-1, x.shape[-1])
    half = scale_dtype == torch.float16
    seed = rounding_seed(rounding, generator)
    y, factor, codes, scales = torch.ops.dist_lib.rms_norm_quantize(
        rows, weight.detach(), eps, codec, block_size, half, seed
    )
    leading = x.shape[:-1]
    codes, scales = codes.view(*leading, codes.shape[1]), scales.view(*leading, *scales.shape[1:])
    return y.view(x.shape), factor, Quantized(codes, scales, x.shape, x.dtype, codec, block_size)


def rms_norm_backward(q: Quantized, factor: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of RMSNorm from the encoded input; with n = decoded input * factor:

    ``dx = factor (g w - n mean(g w n))``, ``dw = sum over rows of g n``, and the output ``n w``.

    Args:
        q: the encoded input, shape (..., dim).
        factor: 1/RMS of the rows, float32 (rows,), exact as the forward pass had it.
        weight: (dim,).
        grad: gradient of the output, (..., dim).

    Returns:
        Gradient of the input (dtype of ``grad``), of the weight (float32), and the output rebuilt.
    """
    codes, scales, count = as_rows(q)
    rows = grad.detach().reshape(-1, count)
    grad_x, grad_weight, y = torch.ops.dist_lib.rms_norm_backward(
        codes, scales, factor, weight.detach(), rows, q.codec, q.block_size
    )
    return grad_x.view(q.shape), grad_weight, y.view(q.shape)


def swiglu_backward(gate: Quantized, up: Quantized, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of ``silu(gate) * up`` from both encoded.

    Args:
        gate, up: of one shape (..., width), in one codec and block size.
        grad: gradient of the product, same shape.

    Returns:
        Gradients of gate and of up, and the product rebuilt; all in the dtype of ``grad``.

    Raises:
        ValueError: shapes, codecs or block sizes that differ.
    """
    kinds = [(q.shape, q.codec, q.block_size, q.scales.dtype) for q in (gate, up)]
    if kinds[0] != kinds[1] or grad.shape != gate.shape:
        raise ValueError(f"gate is {kinds[0]}, up is {kinds[1]}, grad has shape {tuple(grad.shape)}: need the same")
    codes, scales, count = as_rows(gate)
    up_codes, up_scales, _ = as_rows(up)
    rows = grad.detach().reshape(-1, count)
    outs = torch.ops.dist_lib.swiglu_backward(codes, scales, up_codes, up_scales, rows, gate.codec, gate.block_size)
    grad_gate, grad_up, product = (out.view(grad.shape) for out in outs)
    return grad_gate, grad_up, product


def _check_fused(x: Tensor, codec: str) -> None:
    if not (quantize_uses_kernel(x) and CODECS[codec].scales_per_block == 1):
        raise ValueError(
            f"fused=True with a {x.dtype} tensor on {x.device} and codec {codec!r}: the kernel takes float32, float16 "
            "or bfloat16 on a CUDA device from sm_80 on with Triton, and codecs of one scale a block; use fused=False"
        )


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    codec: str = "fp4",
    block_size: int = 128,
    scale_dtype: torch.dtype = torch.float32,
    *,
    fused: bool = False,
) -> tuple[Tensor, Quantized, Quantized]:
    """``silu(gate) * up``, and both encoded. Not differentiable by itself.

    Args:
        gate, up: (..., width), one shape and dtype.
        codec, block_size, scale_dtype: as :func:`dist_lib.ops.quantize`.
        fused: in one kernel, which reads each once. The codes are the same; the product's last bit may differ.

    Raises:
        ValueError: shapes or dtypes that differ; ``fused`` where there is no kernel.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {tuple(gate.shape)} {gate.dtype}, up is {tuple(up.shape)} {up.dtype}: need the same")
    check_choice(codec, block_size, scale_dtype)
    if not fused or gate.numel() == 0:
        coded = [quantize(x, codec, block_size, scale_dtype) for x in (gate, up)]
        return F.silu(gate.detach()) * up.detach(), coded[0], coded[1]
    _check_fused(gate, codec)
    from dist_lib.kernels.fused_swiglu import swiglu_quantize_launch

    a, b = (x.detach().reshape(-1, x.shape[-1]).contiguous() for x in (gate, up))
    product = torch.empty_like(a)
    first, second = (empty_codes(x, codec, block_size, scale_dtype) for x in (a, b))
    table = tables(codec, gate.device)
    with torch.cuda.device_of(gate):
        swiglu_quantize_launch(a, b, product, first, second, CODECS[codec], table, block_size)
    shape, leading = gate.shape, gate.shape[:-1]

    def wrap(codes: Tensor, scales: Tensor) -> Quantized:
        return Quantized(codes.view(*leading, -1), scales.view(*leading, -1), shape, gate.dtype, codec, block_size)

    return product.view(shape), wrap(*first), wrap(*second)


def weight_gradient(grad: Tensor, q: Quantized, *, fused: bool = False) -> Tensor:
    """``grad^T x`` over all rows, for ``x`` in codes: the gradient of a product's weight, in the dtype of ``grad``.

    Args:
        grad: gradient of the product's output, (..., out).
        q: the product's input, (..., dim), rows encoded one by one.
        fused: decode inside the product, so that ``x`` is never written out; each tile of outputs decodes it again.

    Returns:
        (out, dim).

    Raises:
        ValueError: leading dimensions that differ; ``fused`` where there is no kernel, or with ``flat`` blocks.
    """
    if grad.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"grad is {tuple(grad.shape)} and x {tuple(q.shape)}: need the same leading dimensions")
    rows = grad.detach().reshape(-1, grad.shape[-1])
    if not fused or grad.numel() == 0:
        return rows.mT @ q.dequantize(grad.dtype).reshape(-1, q.shape[-1])
    _check_fused(grad, q.codec)
    if q.flat:
        raise ValueError("fused=True needs blocks along rows, and these are flat: use fused=False")
    from dist_lib.kernels.coded_weight_gradient import weight_gradient_launch

    codes, scales, count = as_rows(q)
    out = rows.new_empty((rows.shape[1], count))
    table = tables(q.codec, grad.device)
    with torch.cuda.device_of(grad):
        weight_gradient_launch(rows.contiguous(), codes, scales, out, CODECS[q.codec], table, q.block_size)
    return out
