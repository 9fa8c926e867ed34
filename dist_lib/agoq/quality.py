"""What storing activations in few bits does to gradients: measured on a model, against its exact gradient.

Two measures. :func:`gradient_quality`: the whole gradient of one batch, for different choices of what is stored
encoded; this is the one that decides, and it must be taken at a *trained* checkpoint, where errors are several times
those at initialisation. :func:`local_errors`: each kind of layer by itself, on the activations and gradients that the
model has, as AGoQ's Table 13 does (arXiv 2605.00539). In the first, what AGoQ leaves alone or never stores is encoded
in flat blocks, as a general compressor of saved tensors would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dist_lib.agoq.convert import ActivationPlan, quantize_activations, restore_activations
from dist_lib.agoq.functions import Format, norm_linear, quant_linear
from dist_lib.agoq.hooks import QuantizedSavedTensors
from dist_lib.models import Attention, Decoder, DecoderLayer
from dist_lib.ops import swiglu_backward

# What is stored encoded, by name: the parts of a plan, and whether attention's queries, keys and values are.
SCHEMES: dict[str, tuple[tuple[str, ...], bool]] = {
    "norm inputs": (("norm",), False),
    "out-projection input": (("out",), False),
    "gate and up": (("gate_up",), False),
    "layers": (("norm", "gate_up", "out"), False),
    "attention": ((), True),
    "layers and attention": (("norm", "gate_up", "out"), True),
    "every saved tensor": ((), False),
}


@dataclass(frozen=True)
class GradientQuality:
    """Distance of a gradient from the exact one, ``|g - exact| / |exact|``, and the cosine between them."""

    relative_l2: float
    cosine: float


def attention_from_codes(q: Tensor, k: Tensor, v: Tensor, form: Format) -> Tensor:
    """Causal attention, (B, H, S, E), whose queries, keys and values are stored encoded; nothing else is changed.

    The fused backward pass keeps the exact scores' sum of exponentials. Scores from codes do not belong to it: where
    they are large, as in trained models, weights rebuilt from them add up to far more than 1.
    """
    wanted = {t.data_ptr() for t in (q, k, v)}

    def pack(tensor: Tensor) -> Tensor | tuple[tuple[Tensor, ...], torch.Size, torch.dtype]:
        if tensor.data_ptr() not in wanted or tensor.shape != q.shape:
            return tensor
        return form.encode(tensor), tensor.shape, tensor.dtype

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else form.decode(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _StoredAttention(Attention):
    form: Format

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_from_codes(q, k, v, self.form)


@contextmanager
def storing(model: Decoder, scheme: str, form: Format) -> Iterator[None]:
    """Within, ``model`` stores for backward what ``scheme`` says, encoded as ``form`` says. For measuring only.

    Args:
        model: plain layers.
        scheme: one of :data:`SCHEMES`.
        form: with a codec.

    Raises:
        ValueError: an unknown scheme, or a form without a codec.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    if form.codec is None:
        raise ValueError("measuring the error of storing needs a format with a codec")
    parts, attention = SCHEMES[scheme]
    flat = replace(form, flat=True)
    attentions = [module for module in model.modules() if type(module) is Attention] if attention else []
    if parts:
        plan = ActivationPlan(form.codec, form.block_size, form.scale_dtype, "paper", form.exact_factor, parts)
        quantize_activations(model, plan)
    for module in attentions:
        module.__class__ = _StoredAttention
        module.form = flat  # type: ignore[assignment]
    everything = scheme == "every saved tensor"
    hooks = QuantizedSavedTensors(model, {"layers.*": flat}, min_elements=1) if everything else nullcontext()
    try:
        # Unfused attention, so that the attention weights are among the saved tensors.
        with hooks, sdpa_kernel(SDPBackend.MATH) if everything else nullcontext():
            yield
    finally:
        restore_activations(model)
        for module in attentions:
            module.__class__ = Attention
            module.__dict__.pop("form", None)


def _gradient(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters)
    return torch.cat([g.flatten().double() for g in grads])


def gradient_quality(
    model: Decoder, tokens: Tensor, targets: Tensor, scheme: str, form: Format, *, exact: Tensor | None = None
) -> GradientQuality:
    """The whole gradient of one batch with ``scheme`` and ``form`` against the exact one.

    Args:
        model: plain layers; left as it is.
        tokens, targets: (B, S) int64.
        scheme, form: as :func:`storing`.
        exact: the result of :func:`exact_gradient`, to compute it once for many schemes.
    """
    exact = exact_gradient(model, tokens, targets) if exact is None else exact
    with storing(model, scheme, form):
        found = _gradient(model, model.loss(tokens, targets))
    distance = float((found - exact).norm() / exact.norm())
    return GradientQuality(distance, float(F.cosine_similarity(found, exact, dim=0)))


def exact_gradient(model: Decoder, tokens: Tensor, targets: Tensor) -> Tensor:
    """The gradient of all parameters in one float64 vector."""
    return _gradient(model, model.loss(tokens, targets))


class _Capture:
    """Inputs of layers and the gradients that reach their outputs, of one forward and backward pass."""

    def __init__(self, model: Decoder) -> None:
        self.seen: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for i, layer in enumerate(model.layers):
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "mlp.down_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            ):
                self._watch(f"{i}.{name}", layer.get_submodule(name))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                self._watch(f"{i}.{name}", layer.get_submodule(f"self_attn.{name}"))

    def _watch(self, name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            kept = tuple(t.detach() for t in inputs)
            output.register_hook(lambda grad: self.seen.__setitem__(name, (kept, grad.detach())))

        self._handles.append(module.register_forward_hook(hook))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Watched(Attention):
    log: list[tuple[Tensor, Tensor, Tensor, Tensor]]

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().weigh(q, k, v)
        kept = q.detach(), k.detach(), v.detach()
        out.register_hook(lambda grad: self.log.append((*kept, grad.detach())))
        return out


def local_errors(model: Decoder, tokens: Tensor, targets: Tensor, form: Format) -> dict[str, float]:
    """Relative L2 error of each kind of layer's own gradients when it alone works from codes.

    The gradient that arrives is the exact one. Errors of all layers of a kind are put together as vectors.

    Args:
        model: plain layers; left as it is.
        tokens, targets: (B, S) int64.
        form: with a codec.

    Returns:
        ``norm``: of the input; ``weights``: of the products' weights; ``swiglu``: of gate and up; ``query``, ``key``,
        ``value``: of attention.
    """
    capture, log = _Capture(model), []  # type: ignore[var-annotated]
    attentions = [module for module in model.modules() if type(module) is Attention]
    try:
        for module in attentions:
            module.__class__ = _Watched
            module.log = log  # type: ignore[assignment]
        _gradient(model, model.loss(tokens, targets))
    finally:
        capture.close()
        for module in attentions:
            module.__class__ = Attention
            module.__dict__.pop("log", None)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for i, layer in enumerate(model.layers):
        _layer_pairs(
            pairs, layer, {k.split(".", 1)[1]: v for k, v in capture.seen.items() if k.startswith(f"{i}.")}, form
        )
    for q, k, v, grad in log:
        a, b, c = (t.clone().requires_grad_() for t in (q, k, v))
        exact = torch.autograd.grad(F.scaled_dot_product_attention(a, b, c, is_causal=True), (a, b, c), grad)
        # Decoded first: attention weights belong to the decoded queries and keys, as when they are recomputed.
        d, e, f = (form.decode(form.encode(t), t.shape, t.dtype).requires_grad_() for t in (q, k, v))
        found = torch.autograd.grad(F.scaled_dot_product_attention(d, e, f, is_causal=True), (d, e, f), grad)
        for name, ours, theirs in zip(("query", "key", "value"), found, exact, strict=True):
            pairs.setdefault(name, []).append((ours, theirs))
    return {
        name: (
            sum(float((a - b).double().square().sum()) for a, b in both)
            / sum(float(b.double().square().sum()) for _, b in both)
        )
        ** 0.5
        for name, both in pairs.items()
    }


def _layer_pairs(
    pairs: dict[str, list[tuple[Tensor, Tensor]]],
    layer: DecoderLayer | nn.Module,
    seen: dict[str, tuple[tuple[Tensor, ...], Tensor]],
    form: Format,
) -> None:
    """Add (from codes, exact) for norms, products and SwiGLU of one layer."""
    plain = Format(None)
    for name in ("input_layernorm", "post_attention_layernorm"):
        (x,), grad = seen[name]
        norm = layer.get_submodule(name)
        identity, x = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), x.clone().requires_grad_()
        found = [
            torch.autograd.grad(norm_linear(x, norm.weight.detach(), norm.eps, (identity,), f)[0], x, grad)[0]  # type: ignore[operator, arg-type, union-attr]
            for f in (form, plain)
        ]
        pairs.setdefault("norm", []).append((found[0], found[1]))
    for name in ("q_proj", "o_proj", "mlp.gate_proj", "mlp.down_proj"):
        (x,), grad = seen[name]
        weight = torch.zeros(grad.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
        found = [torch.autograd.grad(quant_linear(x, weight, f), weight, grad)[0] for f in (form, plain)]
        pairs.setdefault("weights", []).append((found[0], found[1]))
    mlp = layer.get_submodule("mlp")
    (x,) = seen["mlp.gate_proj"][0]
    gate, up = (F.linear(x, mlp.get_parameter(f"{n}_proj.weight").detach()) for n in ("gate", "up"))
    grad = seen["mlp.down_proj"][1] @ mlp.get_parameter("down_proj.weight").detach()
    quantised = [form.wrap(form.encode(t), t.shape, t.dtype) for t in (gate, up)]
    ours = swiglu_backward(quantised[0], quantised[1], grad)[:2]
    gate, up = gate.requires_grad_(), up.requires_grad_()
    exact = torch.autograd.grad(F.silu(gate) * up, (gate, up), grad)
    pairs.setdefault("swiglu", []).append((torch.stack(ours), torch.stack(exact)))
