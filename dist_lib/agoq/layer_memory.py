"""What one decoder layer holds for its backward pass, tensor by tensor, under five layouts.

The unit is U = 2 B S H bytes, one BF16 tensor of the hidden size. AGoQ's table 1 (arXiv 2605.00539) gives totals by
column for BF16, COAT and AGoQ and one shape of layer (MLP four times as wide as the model, as many key and value heads
as query heads); which tensors make them up is our reading, found by hooking what an eager layer saves, and so is the
form for any shape. This module counts; it measures nothing.

Layouts:

* ``bf16``: Megatron's layer, norms' inputs in float32.
* ``coat``: 8 bits where COAT has them.
* ``table1``: AGoQ as its table counts. Attention's output is counted once, encoded.
* ``paper``: the same as it can be built: attention's backward pass needs its own output, which stays at 16 bits beside
  the encoded copy.
* ``shared``: ours: the out-projection uses attention's output, and the values are kept by themselves instead of the
  fused buffer that they are a view of. Less than ``table1``, and one gradient more that is exact.

``paper`` and ``shared`` are those of :class:`~dist_lib.agoq.ActivationPlan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from dist_lib.agoq.bit_plan import LOWEST, WHOLE, LayerCost
from dist_lib.models import DecoderConfig

Layout = Literal["bf16", "coat", "table1", "paper", "shared"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
COLUMNS = ("QKV", "Attention", "Linear", "RMSNorm", "FFN1", "Act func", "FFN2")
LAYOUT_NAMES: Mapping[Layout, str] = {
    "bf16": "BF16",
    "coat": "COAT",
    "table1": "AGoQ, as its table counts",
    "paper": "AGoQ, as it can be built",
    "shared": "AGoQ, attention's output shared",
}


@dataclass(frozen=True)
class LayerShape:
    """Ratios on which a layer's bytes depend.

    Attributes:
        phi: width of the MLP over that of the model.
        kappa: key and value heads over query heads.
    """

    phi: Fraction
    kappa: Fraction

    @classmethod
    def of(cls, config: DecoderConfig) -> LayerShape:
        """Of a model."""
        return cls(Fraction(config.d_ff, config.d_model), Fraction(config.n_kv_heads, config.n_heads))


TABLE_1_SHAPE = LayerShape(Fraction(4), Fraction(1))


@dataclass(frozen=True)
class Held:
    """One tensor that is kept.

    Attributes:
        column: of the paper's table 1.
        name: what it is.
        width: its numbers for a token, in multiples of the model's width.
        bits: of a number; None: encoded, with the bits of the plan.
    """

    column: str
    name: str
    width: Fraction
    bits: int | None

    def units(self, bits: int = LOWEST, scale_bits: Fraction | int = 0) -> Fraction:
        """Size in U with so many bits for what is encoded; from 16 on it is not encoded and has no scales."""
        stored = self.bits if self.bits is not None else WHOLE if bits >= WHOLE else bits + Fraction(scale_bits)
        return self.width * stored / 16


def tensors(layout: Layout, shape: LayerShape) -> tuple[Held, ...]:
    """Everything that a layer keeps, but for the statistics of :func:`statistics_bytes`.

    Raises:
        ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: allowed are {', '.join(LAYOUTS)}")
    one, phi, kappa = Fraction(1), shape.phi, shape.kappa
    rotated = [
        Held("Attention", "rotated queries", one, 16),
        Held("Attention", "rotated keys", kappa, 16),
    ]
    buffer = [Held("Attention", "queries, keys and values", 1 + 2 * kappa, 16), *rotated]
    if layout in ("bf16", "coat"):
        eight = layout == "coat"
        rest = 8 if eight else 16
        return (
            Held("RMSNorm", "input of norm 1", one, 8 if eight else 32),
            Held("QKV", "output of norm 1", one, 16),
            *buffer,
            Held("Linear", "attention output", one, 16),
            Held("RMSNorm", "input of norm 2", one, 8 if eight else 32),
            Held("FFN1", "output of norm 2", one, rest),
            Held("Act func", "gate and up", 2 * phi, rest),
            Held("Act func", "SiLU of gate", phi, rest),
            Held("FFN2", "SiLU of gate, times up", phi, rest),
        )
    attention = [*rotated, Held("Attention", "values", kappa, 16)] if layout == "shared" else buffer
    if layout != "table1":
        attention.append(Held("Attention", "attention output", one, 16))
    copy = [] if layout == "shared" else [Held("Linear", "input of the out-projection", one, None)]
    return (
        Held("RMSNorm", "input of norm 1", one, None),
        *attention,
        *copy,
        Held("RMSNorm", "input of norm 2", one, None),
        Held("Act func", "gate and up", 2 * phi, None),
    )


def by_column(
    layout: Layout, shape: LayerShape, *, bits: int = LOWEST, scale_bits: Fraction | int = 0
) -> dict[str, Fraction]:
    """U of each column of the paper's table 1, zeros included."""
    found = dict.fromkeys(COLUMNS, Fraction(0))
    for held in tensors(layout, shape):
        found[held.column] += held.units(bits, scale_bits)
    return found


def layer_units(layout: Layout, shape: LayerShape, *, bits: int = LOWEST, scale_bits: Fraction | int = 0) -> Fraction:
    """U of a whole layer."""
    return sum((held.units(bits, scale_bits) for held in tensors(layout, shape)), Fraction(0))


def layer_cost(layout: Layout, shape: LayerShape, *, scale_bits: Fraction | int = 0) -> LayerCost:
    """The layer for a bit plan: what is fixed and what is encoded, in U."""
    held = tensors(layout, shape)
    coded = sum((h.width for h in held if h.bits is None), Fraction(0))
    fixed = sum((h.units() for h in held if h.bits is not None), Fraction(0))
    return LayerCost(fixed, coded, scale_bits)


def statistics_bytes(config: DecoderConfig, tokens: int) -> int:
    """Bytes beside the tensors: attention's log-sum-exp for each head and two norms' 1/RMS, float32, for each token.

    Raises:
        ValueError: fewer than one token.
    """
    if tokens < 1:
        raise ValueError(f"{tokens} tokens: need at least 1")
    return 4 * tokens * (config.n_heads + 2)
