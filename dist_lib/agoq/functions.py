"""Layers whose backward pass reads codes: norm and products, SwiGLU and product, product alone; as autograd functions.

The forward pass computes with the numbers as they are, so its result is that of the plain layers. What backward needs
is encoded and the numbers are let go: of a norm and the products that follow only the norm's *input* is kept; of SwiGLU
only gate and up. What lies between is rebuilt. So gradients with respect to a product's input stay exact given the
gradient that arrives; error enters through the weights' gradients and through the slopes of norm and SwiGLU.
(On a CPU the forward pass is the plain layers' bit for bit. On a GPU the norm comes from a kernel that adds a row's
squares in another order than torch, which may move its last bit.)

Everything kept goes through ``save_for_backward``: hooks on saved tensors, activation checkpointing and memory counters
see it. Source: AGoQ (arXiv 2605.00539), layer-aware activation quantisation; that the factor 1/RMS is kept exactly
(4 bytes a token) is our choice, and optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_lib.ops import Quantized, dequantize, quantize, rms_norm_backward, rms_norm_quantize, swiglu_backward
from dist_lib.ops.quantization import check_choice


@dataclass(frozen=True)
class Format:
    """How an activation is stored.

    Attributes:
        codec: a key of ``dist_lib.ops.CODECS``; None stores the tensor as it is (the layers without quantisation, for
            comparison and for ``gradcheck``).
        block_size: numbers that share a scale.
        scale_dtype: float32 or float16.
        exact_factor: keep the norm's 1/RMS in float32; False recomputes it from the decoded input, as the paper does.
        flat: blocks over the flattened tensor, across tokens and heads, as general compressors cut them. The layers
            here refuse it; saved tensors of other operations may be stored so.
    """

    codec: str | None = "fp4"
    block_size: int = 128
    scale_dtype: torch.dtype = torch.float32
    exact_factor: bool = True
    flat: bool = False

    def __post_init__(self) -> None:
        if self.codec is not None:
            check_choice(self.codec, self.block_size, self.scale_dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """What to save for ``x``: codes and scales, or ``x``."""
        if self.codec is None:
            return (x,)
        q = quantize(x, self.codec, self.block_size, self.scale_dtype, flat=self.flat)
        return q.codes, q.scales

    def wrap(self, saved: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Quantized:
        """The saved codes and scales as one object."""
        if self.codec is None:
            raise ValueError("a format without a codec stores the tensor itself")
        return Quantized(saved[0], saved[1], shape, dtype, self.codec, self.block_size, self.flat)

    def decode(self, saved: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The tensor again."""
        return saved[0] if self.codec is None else dequantize(self.wrap(saved, shape, dtype))

    @property
    def parts(self) -> int:
        """Tensors that :meth:`encode` returns."""
        return 1 if self.codec is None else 2


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``grad^T x`` over all tokens, in the weight's dtype."""
    product = grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1]).to(grad.dtype)
    return product.to(weight.dtype)


def _plain_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm and its factor (..., 1), in float32 (float64 stays)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * (wide * factor).to(x.dtype), factor


def _plain_norm_backward(x: Tensor, factor: Tensor, gain: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = x.to(wide) * factor
    y = gain * normal.to(x.dtype)
    inner = grad.to(wide) * gain.to(wide)
    grad_x = factor * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return grad_x, (grad.to(wide) * normal).flatten(0, -2).sum(0), y


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, gain: Tensor, eps: float, form: Format, one_buffer: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        if form.codec is None:
            y, factor = _plain_norm(x, gain, eps)
            saved: tuple[Tensor, ...] = (x,)
        else:
            y, factor, q = rms_norm_quantize(x, gain, eps, form.codec, form.block_size, form.scale_dtype)
            saved = (q.codes, q.scales)
        kept = (factor,) if form.exact_factor else ()
        ctx.save_for_backward(gain, *weights, *saved, *kept)
        ctx.form, ctx.eps, ctx.shape, ctx.dtype, ctx.count = form, eps, x.shape, x.dtype, len(weights)
        ctx.set_materialize_grads(False)  # an output that nobody used costs nothing
        outs = [F.linear(y, w) for w in weights]
        if one_buffer:
            return tuple(torch.cat(outs, dim=-1).split([w.shape[0] for w in weights], dim=-1))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gain, *rest = ctx.saved_tensors
        weights, rest = rest[: ctx.count], rest[ctx.count :]
        saved, form = rest[: ctx.form.parts], ctx.form
        pairs = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
        if not pairs:
            return tuple(None for _ in ctx.needs_input_grad)
        inner = pairs[0][0] @ pairs[0][1].to(pairs[0][0].dtype)
        for g, w in pairs[1:]:
            inner = inner + g @ w.to(g.dtype)
        inner = inner.to(ctx.dtype)
        if form.codec is None:
            x = saved[0]
            factor = rest[1] if form.exact_factor else _plain_norm(x, gain, ctx.eps)[1]
            grad_x, grad_gain, y = _plain_norm_backward(x, factor, gain, inner)
        else:
            q = form.wrap(saved, ctx.shape, ctx.dtype)
            factor = rest[2] if form.exact_factor else _plain_norm(q.dequantize(torch.float32), gain, ctx.eps)[1]
            grad_x, grad_gain, y = rms_norm_backward(q, factor.flatten(), gain, inner)
        needed = ctx.needs_input_grad[5:]
        grad_weights = [
            _weight_grad(g, y, w) if g is not None and need else None
            for g, w, need in zip(grads, weights, needed, strict=True)
        ]
        return grad_x.to(ctx.dtype), grad_gain.to(gain.dtype), None, None, None, *grad_weights


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, form: Format) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight, *form.encode(gate), *form.encode(up))
        ctx.form, ctx.shape, ctx.dtype = form, gate.shape, gate.dtype
        return F.linear(F.silu(gate).mul_(up), weight)  # in place: one tensor of this width less at the peak

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, *saved = ctx.saved_tensors
        form, parts = ctx.form, ctx.form.parts
        inner = (grad @ weight.to(grad.dtype)).to(ctx.dtype)
        if form.codec is None:
            gate, up = saved
            gated = torch.sigmoid(gate)
            silu = gate * gated
            grad_gate, grad_up, product = inner * up * (gated + silu * (1 - gated)), inner * silu, silu * up
        else:
            gate, up = (form.wrap(part, ctx.shape, ctx.dtype) for part in (saved[:parts], saved[parts:]))
            grad_gate, grad_up, product = swiglu_backward(gate, up, inner)
        del inner  # before the weight's gradient needs room
        grad_weight = _weight_grad(grad, product, weight) if ctx.needs_input_grad[2] else None
        return grad_gate, grad_up, grad_weight, None


class _QuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: Format) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight, *form.encode(x))
        ctx.form, ctx.shape, ctx.dtype = form, x.shape, x.dtype
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, *saved = ctx.saved_tensors
        grad_x = (grad @ weight.to(grad.dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        return grad_x, _weight_grad(grad, ctx.form.decode(saved, ctx.shape, ctx.dtype), weight), None


def _refuse_flat(form: Format) -> None:
    if form.flat:
        raise ValueError("a layer's blocks must not span tokens: use a Format with flat=False")


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weights: Sequence[Tensor], form: Format, *, one_buffer: bool = False
) -> tuple[Tensor, ...]:
    """RMSNorm and the products that share its output; kept for backward: ``x`` encoded, and 1/RMS.

    Args:
        x: (..., dim).
        gain: (dim,), the norm's weight.
        eps: added to the mean square.
        weights: each (out, dim), as of ``nn.Linear`` without bias.
        form: how ``x`` is stored.
        one_buffer: return slices of one tensor, as a fused projection does: whatever keeps one slice keeps all.

    Returns:
        ``norm(x) @ w.T`` for each weight, (..., out).

    Raises:
        ValueError: no weights, or one that does not fit.
    """
    if not weights or any(w.ndim != 2 or w.shape[1] != x.shape[-1] for w in weights):
        shapes = [tuple(w.shape) for w in weights]
        raise ValueError(f"weights have shapes {shapes}; need at least one, each (out, {x.shape[-1]})")
    _refuse_flat(form)
    outs: tuple[Tensor, ...] = _NormLinear.apply(x, gain, eps, form, one_buffer, *weights)  # type: ignore[no-untyped-call]
    return outs


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, form: Format) -> Tensor:
    """``(silu(gate) * up) @ weight.T``; kept for backward: gate and up encoded.

    Args:
        gate, up: (..., width).
        weight: (out, width).
        form: how both are stored.

    Raises:
        ValueError: shapes that do not fit.
    """
    if gate.shape != up.shape or weight.ndim != 2 or weight.shape[1] != gate.shape[-1]:
        shapes = tuple(gate.shape), tuple(up.shape), tuple(weight.shape)
        raise ValueError(f"gate, up and weight have shapes {shapes}; need (..., width) twice and (out, width)")
    _refuse_flat(form)
    out: Tensor = _SwiGLULinear.apply(gate, up, weight, form)  # type: ignore[no-untyped-call]
    return out


def quant_linear(x: Tensor, weight: Tensor, form: Format) -> Tensor:
    """``x @ weight.T``; kept for backward: ``x`` encoded. The gradient of ``x`` does not need it, so it is exact.

    Args:
        x: (..., dim).
        weight: (out, dim).
        form: how ``x`` is stored.

    Raises:
        ValueError: shapes that do not fit.
    """
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; need (out, {x.shape[-1]})")
    _refuse_flat(form)
    out: Tensor = _QuantLinear.apply(x, weight, form)  # type: ignore[no-untyped-call]
    return out
