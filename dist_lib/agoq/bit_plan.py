"""How many bits each pipeline stage spends on activations, from how many micro-batches it holds at once.

Early stages wait longest for their backward passes, so they hold most and set the peak; later ones may spend more bits
for the same bytes. This module is arithmetic: :func:`in_flight` counts what a stage holds under 1F1B and interleaved
1F1B, :func:`make_bit_plan` chooses bits by one of four rules, and :class:`BitPlan` says what a stage then holds, what
sits beside it included (the embedding on the first stage, head and logits on the last). Sizes are in any one unit, as a
rule U, the bytes of one BF16 hidden tensor. Stages count from 0 here.

Rules:

* ``paper``: ``min(8, round(4 N_1 / N_i))``, at least 4. AGoQ (arXiv 2605.00539) gives the ratio and, for 4 stages, the
  bits 4, 5, 6, 8; that they are rounded to the nearest is read off those.
* ``floor``: the same, rounded down, so that ``N_i b_i`` never exceeds ``4 N_1``. Ours.
* ``release``: the authors' code: by quarter of the layers 4, 5, 8 and 16 bits, whatever the schedule; its 5-bit codes
  fill a byte each.
* ``budget``: the most bits with which a stage stays within the dearest stage at 4 bits, everything counted: what is not
  encoded shrinks with ``N_i`` as well. Ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Rule = Literal["paper", "floor", "release", "budget"]
RULES: tuple[Rule, ...] = get_args(Rule)
WIDTHS = (4, 5, 6, 8, 16)  # bits for which there are codecs; 16: not encoded
CODECS_OF_WIDTH = {5: "int5", 6: "int6", 8: "int8", 16: None}
LOWEST, WHOLE = 4, 16
RELEASE_QUARTERS = (4, 5, 8, 16)
Number = Fraction | float | int


class BudgetError(ValueError):
    """Stages that would hold more than they may."""


def _check_sizes(stages: int, micro_batches: int, chunks: int) -> None:
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if chunks > 1 and micro_batches % stages:
        raise ValueError(
            f"{micro_batches} micro-batches on {stages} stages with {chunks} chunks each: interleaving goes round in "
            f"groups of {stages}; give a multiple of {stages} micro-batches, or one chunk"
        )


def _ahead(stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Forward passes (of a chunk) that a stage runs before its first backward pass may follow the next one."""
    if chunks == 1:
        return min(stages - 1 - stage, micro_batches)
    return min(2 * (stages - 1 - stage) + (chunks - 1) * stages, micro_batches * chunks)


def in_flight(stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Micro-batches (times chunks) whose activations each stage holds at most, first stage first.

    1F1B (``chunks == 1``): ``min(n - s, m)``. Interleaved with v chunks (Megatron's order):
    ``min(2 (n - 1 - s) + (v - 1) n + 1, m v)``, each unit being one chunk of ``L / (n v)`` layers. Four stages, two
    chunks and eight micro-batches hold 11, 9, 7, 5. The paper prints ``n + 2 i - 1`` (for v = 2), which counts stages
    from the last.

    Raises:
        ValueError: a size below 1; chunks with micro-batches that are no multiple of the stages.
    """
    _check_sizes(stages, micro_batches, chunks)
    total = micro_batches * chunks
    return tuple(min(_ahead(s, stages, micro_batches, chunks) + 1, total) for s in range(stages))


def held_chunks(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterator[tuple[int, ...]]:
    """What a stage holds after each of its forward passes: for each of its chunks the number of micro-batches.

    Their sum is at most :func:`in_flight`; which chunks they belong to changes on the way, which matters where chunks
    differ in bits.

    Raises:
        ValueError: as :func:`in_flight`; a stage that is none.
    """
    _check_sizes(stages, micro_batches, chunks)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage}: the stages are 0 to {stages - 1}")
    ahead, group = _ahead(stage, stages, micro_batches, chunks), stages * chunks
    held = [0] * chunks
    for k in range(micro_batches * chunks):
        if k > ahead:  # the backward pass before this forward pass; backward goes through the chunks from the last
            held[chunks - 1 - (k - ahead - 1) % group // stages] -= 1
        held[k % group // stages] += 1
        yield tuple(held)


@dataclass(frozen=True)
class LayerCost:
    """What one layer holds for one micro-batch, in one unit.

    Attributes:
        fixed: what is never encoded (attention's own tensors).
        coded: what is encoded, at 16 bits.
        scale_bits: of scales, per encoded number: 32 / block size with float32 scales.
    """

    fixed: Number
    coded: Number
    scale_bits: Number = 0

    def at(self, bits: int) -> Number:
        """The layer at so many stored bits a number; from 16 on it is kept as it is, without scales."""
        if bits >= WHOLE:
            return self.fixed + self.coded
        return self.fixed + self.coded * Fraction(bits + Fraction(self.scale_bits)) / WHOLE

    def most_bits(self, room: Number) -> int:
        """The most whole bits, at most 16, with which the layer takes no more than ``room``; 0 or less: none do."""
        if self.at(WHOLE) <= room:
            return WHOLE
        return min(math.floor(WHOLE * (room - self.fixed) / self.coded - self.scale_bits), WHOLE - 1)


@dataclass(frozen=True)
class BitPlan:
    """Bits of every layer.

    Attributes:
        rule: how they were chosen.
        stages, micro_batches, chunks: of the pipeline; one chunk: plain 1F1B.
        bits: precision of each layer of the model, in order; 16: not encoded.
        stored_bits: what a number occupies; more than ``bits`` only for the release's 5-bit codes.
    """

    rule: Rule
    stages: int
    micro_batches: int
    chunks: int
    bits: tuple[int, ...]
    stored_bits: tuple[int, ...]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """See :func:`in_flight`."""
        return in_flight(self.stages, self.micro_batches, self.chunks)

    def layers_of(self, stage: int, chunk: int) -> range:
        """Numbers of the layers in a stage's chunk: chunk c of stage s is the (c n + s)-th piece of the model."""
        size = len(self.bits) // (self.stages * self.chunks)
        start = (chunk * self.stages + stage) * size
        return range(start, start + size)

    def bits_of_stage(self, stage: int) -> tuple[int, ...]:
        """The different precisions on a stage, ascending: one, but for the release's rule."""
        return tuple(sorted({self.bits[i] for c in range(self.chunks) for i in self.layers_of(stage, c)}))

    def held(self, stage: int, cost: LayerCost) -> Number:
        """The most that a stage's layers hold at once."""
        sizes = [sum(cost.at(self.stored_bits[i]) for i in self.layers_of(stage, c)) for c in range(self.chunks)]
        moments = set(held_chunks(stage, self.stages, self.micro_batches, self.chunks))
        return max(sum(n * size for n, size in zip(counts, sizes, strict=True)) for counts in moments)

    def totals(self, cost: LayerCost, extra: Sequence[Number] | None = None) -> tuple[Number, ...]:
        """What every stage holds, ``extra`` (one number a stage) included."""
        beside = _extra(extra, self.stages)
        return tuple(self.held(s, cost) + beside[s] for s in range(self.stages))

    def check_peak(
        self, cost: LayerCost, extra: Sequence[Number] | None = None, *, budget: Number | None = None
    ) -> None:
        """Make sure that no stage holds more than ``budget``; default: than the dearest stage with 4 bits everywhere.

        Raises:
            BudgetError: naming the stages and by how much.
        """
        pipeline = (self.stages, self.micro_batches, self.chunks)
        limit = uniform_peak(len(self.bits), *pipeline, cost, extra) if budget is None else budget
        over = {s: total for s, total in enumerate(self.totals(cost, extra)) if total > limit}
        if over:
            named = ", ".join(f"stage {s} {float(total):.6g}" for s, total in over.items())
            raise BudgetError(
                f"rule {self.rule!r} lets stages hold more than {float(limit):.6g}: {named}; use rule 'budget'"
            )

    def codecs(self, four_bits: str = "fp4") -> list[str | None]:
        """The codec of each layer, for :class:`~dist_lib.agoq.ActivationPlan`.

        Args:
            four_bits: which of the 4-bit codecs.

        Raises:
            ValueError: a layer with bits for which there is no codec (make the plan with ``widths=WIDTHS``).
        """
        if odd := sorted(set(self.bits) - set(WIDTHS)):
            raise ValueError(f"no codec has {odd} bits: make the plan with widths=WIDTHS, {WIDTHS}")
        return [four_bits if b == LOWEST else CODECS_OF_WIDTH[b] for b in self.bits]


def _extra(extra: Sequence[Number] | None, stages: int) -> Sequence[Number]:
    if extra is not None and len(extra) != stages:
        raise ValueError(f"extra has {len(extra)} numbers for {stages} stages: give one for each")
    return extra if extra is not None else (0,) * stages


def _chunk_layers(layers: int, stages: int, chunks: int) -> int:
    if layers < 1 or layers % (stages * chunks):
        raise ValueError(
            f"{layers} layers do not divide evenly into {stages} stages of {chunks} chunks: give a multiple of "
            f"{stages * chunks} layers"
        )
    return layers // (stages * chunks)


def uniform_peak(
    layers: int,
    stages: int,
    micro_batches: int,
    chunks: int,
    cost: LayerCost,
    extra: Sequence[Number] | None = None,
    *,
    bits: int = LOWEST,
) -> Number:
    """What the dearest stage holds with the same bits everywhere: no plan of at least so many bits holds less.

    Raises:
        ValueError: sizes that do not fit.
    """
    each, beside = _chunk_layers(layers, stages, chunks), _extra(extra, stages)
    counts = in_flight(stages, micro_batches, chunks)
    return max(n * each * cost.at(bits) + more for n, more in zip(counts, beside, strict=True))


def ratio_bits(counts: Sequence[int], *, nearest: bool) -> tuple[int, ...]:
    """``4 N_1 / N_i`` as whole bits from 4 to 8; ``nearest`` rounds (halves up), else down."""
    raw = [Fraction(LOWEST * counts[0], n) for n in counts]
    return tuple(min(8, max(LOWEST, math.floor(b + Fraction(1, 2) if nearest else b))) for b in raw)


def _budget_bits(
    counts: Sequence[int], each: int, cost: LayerCost, beside: Sequence[Number], limit: Number
) -> tuple[int, ...]:
    found = []
    for stage, (n, more) in enumerate(zip(counts, beside, strict=True)):
        bits = cost.most_bits((limit - more) / (n * each))
        if bits < LOWEST:
            least = n * each * cost.at(LOWEST) + more
            raise BudgetError(
                f"stage {stage} holds {float(least):.6g} with {LOWEST} bits, more than the budget of "
                f"{float(limit):.6g}: allow more, shorten the sequence, or use more stages or tensor parallelism"
            )
        found.append(bits)
    return tuple(found)


def make_bit_plan(
    rule: Rule,
    *,
    layers: int,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    cost: LayerCost | None = None,
    extra: Sequence[Number] | None = None,
    budget: Number | None = None,
    widths: Sequence[int] | None = WIDTHS,
) -> BitPlan:
    """Choose bits.

    Args:
        rule: see the module.
        layers: of the model, a multiple of ``stages * chunks``.
        stages, micro_batches, chunks: of the pipeline.
        cost: of a layer; only ``budget`` needs it.
        extra: what each stage holds beside its layers, in the unit of ``cost``; only for ``budget``.
        budget: what a stage may hold; default: what the dearest stage holds with 4 bits.
        widths: bits that can be stored, rounded down to; None: all whole numbers.

    Raises:
        ValueError: an unknown rule, sizes that do not fit, ``budget`` without a cost.
        BudgetError: a stage that does not fit in ``budget`` even with 4 bits.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r}: allowed are {', '.join(RULES)}")
    counts = in_flight(stages, micro_batches, chunks)
    each, beside = _chunk_layers(layers, stages, chunks), _extra(extra, stages)
    if rule == "release":
        bits = tuple(RELEASE_QUARTERS[4 * i // layers] for i in range(layers))
        return BitPlan(rule, stages, micro_batches, chunks, bits, tuple(8 if b == 5 else b for b in bits))
    if rule == "budget":
        if cost is None:
            raise ValueError("rule 'budget' counts everything that a stage holds: give cost, what a layer holds")
        pipeline = (layers, stages, micro_batches, chunks)
        limit = uniform_peak(*pipeline, cost, beside) if budget is None else budget
        chosen = _budget_bits(counts, each, cost, beside, limit)
    else:
        chosen = ratio_bits(counts, nearest=rule == "paper")
    if widths is not None:
        chosen = tuple(max(w for w in (LOWEST, *widths) if w <= b) for b in chosen)
    per_layer = tuple(chosen[i // each % stages] for i in range(layers))
    return BitPlan(rule, stages, micro_batches, chunks, per_layer, per_layer)
