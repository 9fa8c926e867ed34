"""Drop-in modules around the quantised functions: a linear layer, a norm with its products, SwiGLU with its product.

Parameter names and shapes are those of the plain modules, so state dicts pass between them. Without a gradient
(``torch.no_grad``) nothing is encoded, since nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_lib.agoq.functions import Format, norm_linear, quant_linear, swiglu_linear
from dist_lib.models import DecoderLayer, RMSNorm


def plain_weights(*layers: nn.Module) -> list[Tensor]:
    """The weights of linear layers that are nothing more than a weight.

    Raises:
        ValueError: another class, a bias, or a hook, which the quantised functions would pass by.
    """
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{type(layer).__name__} cannot be quantised: only torch.nn.Linear can")
        if layer.bias is not None:
            raise ValueError(
                "a linear layer with a bias cannot be quantised: use bias=False, or leave it out of the plan"
            )
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            raise ValueError("a linear layer has hooks, which would not be called: remove them first")
    return [layer.weight for layer in layers]  # type: ignore[misc]


class QuantLinear(nn.Linear):
    """``nn.Linear`` without bias that keeps its input encoded for the weight gradient."""

    def __init__(self, in_features: int, out_features: int, form: Format = Format()) -> None:  # noqa: B008
        super().__init__(in_features, out_features, bias=False)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return quant_linear(x, self.weight, self.form) if torch.is_grad_enabled() else F.linear(x, self.weight)


class NormLinear(nn.Module):
    """RMSNorm and linear layers that share its output; keeps the norm's input encoded.

    Args:
        dim: of the input.
        widths: of each output.
        eps: of the norm.
        form: how the input is kept.
    """

    def __init__(self, dim: int, widths: Sequence[int], *, eps: float = 1e-5, form: Format = Format()) -> None:  # noqa: B008
        super().__init__()
        self.norm = RMSNorm(dim, eps)
        self.products = nn.ModuleList(nn.Linear(dim, width, bias=False) for width in widths)
        self.form = form

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., dim) -> one (..., width) for each width."""
        return norm_products(self.norm, self.products, x, self.form)


class SwiGLULinear(nn.Linear):
    """``silu(gate) * up`` and a linear layer; keeps gate and up encoded."""

    def __init__(self, in_features: int, out_features: int, form: Format = Format()) -> None:  # noqa: B008
        super().__init__(in_features, out_features, bias=False)
        self.form = form

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """(..., in_features) twice -> (..., out_features)."""
        return gated_product(gate, up, self.weight, self.form)


def norm_products(
    norm: nn.Module, products: Sequence[nn.Module] | nn.ModuleList, x: Tensor, form: Format, *, one_buffer: bool = False
) -> tuple[Tensor, ...]:
    """A norm module (with ``weight`` and ``eps`` or ``variance_epsilon``) and linear ones, as :func:`norm_linear`."""
    layers = list(products)
    if not torch.is_grad_enabled():
        y = norm(x)
        return tuple(layer(y) for layer in layers)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return norm_linear(x, norm.weight, float(eps), plain_weights(*layers), form, one_buffer=one_buffer)  # type: ignore[arg-type]


def gated_product(gate: Tensor, up: Tensor, weight: Tensor, form: Format) -> Tensor:
    """:func:`swiglu_linear`, or plain where no gradient is wanted."""
    if torch.is_grad_enabled():
        return swiglu_linear(gate, up, weight, form)
    return F.linear(F.silu(gate) * up, weight)


@dataclass(frozen=True)
class LayerForms:
    """How a decoder layer keeps its activations.

    Attributes:
        norm: the inputs of both norms.
        gate_up: gate and up.
        out: the input of attention's out-projection, besides attention's own output; None: use that one.
        one_buffer: whether queries, keys and values live in one tensor.
    """

    norm: Format
    gate_up: Format
    out: Format | None
    one_buffer: bool


def quantised_mlp(norm: nn.Module, mlp: nn.Module, x: Tensor, forms: LayerForms) -> Tensor:
    """Norm, gate and up, SwiGLU and down of a Llama-like MLP: x and gate and up are kept encoded."""
    gate, up = norm_products(norm, (mlp.gate_proj, mlp.up_proj), x, forms.norm)  # type: ignore[arg-type]
    return gated_product(gate, up, plain_weights(mlp.down_proj)[0], forms.gate_up)  # type: ignore[arg-type]


def out_projection(layer: nn.Module, x: Tensor, form: Format | None) -> Tensor:
    """Attention's last product: its input encoded, or, with no format, kept as attention keeps it anyway."""
    if form is None or not torch.is_grad_enabled():
        out: Tensor = layer(x)
        return out
    return quant_linear(x, plain_weights(layer)[0], form)


class QuantizedDecoderLayer(DecoderLayer):
    """The decoder's layer with its activations encoded; made by changing the class of a :class:`DecoderLayer`.

    Attention's own tensors (rotated queries and keys, values, output, softmax statistics) are left alone.

    Attributes:
        forms: how the activations are kept.
    """

    forms: LayerForms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        attention, forms = self.self_attn, self.forms
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = norm_products(self.input_layernorm, projections, x, forms.norm, one_buffer=forms.one_buffer)
        mixed = attention.mix(q, k, v, cos, sin)
        del q, k, v  # as names of this frame they would be held through the MLP
        x = x + out_projection(attention.o_proj, mixed, forms.out)
        return x + quantised_mlp(self.post_attention_layernorm, self.mlp, x, forms)
