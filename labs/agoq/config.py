"""Settings of the lab."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dist_lib.agoq import ActivationPlan, GradientFormat, QuantizedReducer
from dist_lib.agoq.quality import SCHEMES

PIECES = {
    "baseline": "",
    "activations": "A",
    "gradients": "G",
    "optimizer": "O",
    "all": "AGO",
}
PARALLEL = ("replicated", "fsdp")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings.

    Attributes:
        model: name of a decoder configuration.
        steps: of each training.
        batch_size: sequences in the global batch; a multiple of ranks times micro-batches.
        seq_len: tokens in a sequence.
        micro_batches: equal parts of a rank's share of the batch, whose gradients are added up.
        lr: peak learning rate of AdamW, with 32-bit state and with 8-bit state.
        compared: methods that are trained beside the baseline, of ``activations`` (A), ``gradients`` (G),
            ``optimizer`` (O) and ``all`` three.
        codec: number format of the activations.
        block_size: activations that share a scale.
        layout: ``shared`` or ``paper``, see :class:`~dist_lib.agoq.ActivationPlan`.
        gradient_codec: number format of the gradients, stored and sent.
        gradient_block: gradients that share a scale.
        min_elements: parameters with fewer elements keep float32 gradients.
        schemes: what else could be stored encoded, measured at the trained checkpoint only; of
            ``dist_lib.agoq.quality.SCHEMES``.
        parallel: ``replicated`` weights, or sharded ones (``fsdp``: FSDP2 layer by layer; gradients travel in 8 bits
            and add up in float32 shards).
        dtype: of weights and activations; with ``bfloat16`` the optimizer keeps float32 weights.
        weight_decay: of AdamW.
        warmup: steps of linear warm-up; then half a cosine to a tenth of the peak.
        clip_norm: largest norm of the gradient; 0 does not clip.
        save_every: steps between saved states; 0 saves only between trainings.
    """

    model: str
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    micro_batches: int = 2
    compared: tuple[str, ...] = ("activations", "gradients", "optimizer", "all")
    codec: str = "fp4"
    block_size: int = 128
    layout: str = "shared"
    gradient_codec: str = "int8"
    gradient_block: int = 256
    min_elements: int = 4096
    schemes: tuple[str, ...] = ("layers", "attention", "every saved tensor")
    parallel: str = "replicated"
    dtype: str = "float32"
    weight_decay: float = 0.1
    warmup: int = 10
    clip_norm: float = 1.0
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.lr <= 0:
            raise ValueError(f"lr = {self.lr} must be above 0")
        if min(self.weight_decay, self.warmup, self.clip_norm, self.save_every, self.min_elements) < 0:
            raise ValueError("weight_decay, warmup, clip_norm, save_every and min_elements must be at least 0")
        for name, allowed in (("parallel", PARALLEL), ("dtype", tuple(DTYPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(allowed)}")
        for name, known in (("compared", tuple(PIECES)[1:]), ("schemes", tuple(SCHEMES))):
            given = getattr(self, name)
            if [n for n in given if n not in known] or len(set(given)) != len(given):
                raise ValueError(f"{name} = {given} must be some of {', '.join(known)}, each once")
        self.plan()  # refuses a wrong codec, block size or layout
        self.form()

    def plan(self) -> ActivationPlan:
        """How activations are kept."""
        return ActivationPlan(self.codec, self.block_size, layout=self.layout)

    def form(self) -> GradientFormat:
        """How gradients are stored and sent."""
        return GradientFormat(self.gradient_codec, self.gradient_block)

    def reducer(self) -> QuantizedReducer:
        """How gradients are summed over ranks."""
        return QuantizedReducer(self.form(), min_elements=self.min_elements)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return DTYPES[self.dtype]
