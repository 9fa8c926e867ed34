"""Switch a model's activations to codes in place, and back.

The class of each decoder layer is exchanged for one whose ``forward`` calls the quantised functions; parameters, names
and state dicts stay as they are. Our :class:`~dist_lib.models.Decoder` and Hugging Face's Llama are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dist_lib.agoq.functions import Format
from dist_lib.agoq.modules import LayerForms, QuantizedDecoderLayer, plain_weights
from dist_lib.models import DecoderLayer

LAYOUTS = ("shared", "paper")
PARTS = ("norm", "gate_up", "out")


@dataclass(frozen=True)
class ActivationPlan:
    """What is stored how.

    Attributes:
        codec: of every layer, or one for each layer in order; None leaves a layer as it is.
        block_size: numbers that share a scale; blocks never span tokens.
        scale_dtype: float32 or float16.
        layout: ``"shared"``: the out-projection uses attention's own output, and the values are kept by themselves
            (fewer bytes, exact gradient of that weight); ``"paper"``: its input is encoded besides, and queries, keys
            and values live in one buffer that the values keep alive, as AGoQ's Table 1 counts.
        parts: which of :data:`PARTS` are encoded; the others are kept as they are (nothing is kept that can be rebuilt
            all the same). For measuring what each costs.
        exact_factor: keep the norms' 1/RMS exactly (4 bytes a token); False: recompute it from codes, as the paper.
    """

    codec: str | Sequence[str | None] | None = "fp4"
    block_size: int = 128
    scale_dtype: torch.dtype = torch.float32
    layout: str = "shared"
    exact_factor: bool = True
    parts: Sequence[str] = PARTS

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; choose one of {LAYOUTS}")
        if unknown := sorted(set(self.parts) - set(PARTS)):
            raise ValueError(f"parts name {unknown}; choose from {PARTS}")
        for codec in {self.codec} if self.codec is None or isinstance(self.codec, str) else set(self.codec):
            self.forms(codec)

    def forms(self, codec: str | None) -> LayerForms:
        """How a layer with that codec keeps its activations."""
        norm, gate_up, out = (
            Format(codec if part in self.parts else None, self.block_size, self.scale_dtype, self.exact_factor)
            for part in PARTS
        )
        paper = self.layout == "paper"
        return LayerForms(norm, gate_up, out if paper else None, one_buffer=paper)

    def per_layer(self, layers: int) -> list[str | None]:
        """The codec of each layer.

        Raises:
            ValueError: as many codecs as layers are needed.
        """
        if self.codec is None or isinstance(self.codec, str):
            return [self.codec] * layers
        if len(self.codec) != layers:
            raise ValueError(f"the plan names {len(self.codec)} codecs for {layers} layers: give one, or one for each")
        return list(self.codec)


def _decoder_layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module], type[nn.Module]]]:
    """Layers with their plain and their quantised class, in order."""
    from dist_lib.agoq.huggingface import llama_classes

    known: list[tuple[type[nn.Module], type[nn.Module]]] = [(DecoderLayer, QuantizedDecoderLayer)]
    known += llama_classes()
    for name, module in model.named_modules():
        for plain, quantised in known:
            if type(module) in (plain, quantised):
                yield module, plain, quantised
            elif isinstance(module, plain):
                raise ValueError(
                    f"{name} is a {type(module).__name__}, a class made from {plain.__name__}: convert the model "
                    "before it is wrapped (fully_shard, for one, changes classes)"
                )


def quantize_activations(model: nn.Module, plan: ActivationPlan) -> nn.Module:
    """Store the activations of every decoder layer as ``plan`` says; in place, returns ``model``.

    Call it before ``fully_shard``, ``DistributedDataParallel`` or ``torch.compile``. With ``fully_shard`` shard whole
    layers, not the linear layers inside them, whose weights are used without calling them. A second call replaces the
    plan.

    Args:
        model: a :class:`~dist_lib.models.Decoder`, a Hugging Face Llama, or a module that holds their layers.
        plan: formats and layout.

    Raises:
        ValueError: no layers that are known; layers that are wrapped already; linear layers with a bias or hooks; a
            number of codecs that is not that of the layers. The model is then as it was.
    """
    found = list(_decoder_layers(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that can be quantised: need our Decoder or a Llama"
        )
    codecs = plan.per_layer(len(found))
    for layer, _, _ in found:
        plain_weights(*(module for module in layer.modules() if isinstance(module, nn.Linear)))
    for (layer, plain, quantised), codec in zip(found, codecs, strict=True):
        if codec is None:
            _plain(layer, plain)
            continue
        layer.__class__ = quantised
        layer.forms = plan.forms(codec)  # type: ignore[assignment]
    return model


def _plain(layer: nn.Module, plain: type[nn.Module]) -> None:
    layer.__class__ = plain
    layer.__dict__.pop("forms", None)


def restore_activations(model: nn.Module) -> nn.Module:
    """Undo :func:`quantize_activations`, in place; returns ``model``. Layers that are plain stay so."""
    for layer, plain, _ in _decoder_layers(model):
        _plain(layer, plain)
    return model
