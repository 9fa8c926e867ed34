"""The memory of one device in training, by kind and pipeline stage, from a model's configuration; and what would fit.

Counted: weights, gradients, master weights and moments of a stage's parameters; what its layers keep for every
micro-batch in flight, statistics included; on the last stage logits and what comes with them. Not counted: the
allocator's fragments, workspaces, buffers of collectives, and temporary tensors inside a layer. So it is a lower bound
of what a tool would show, and :mod:`dist_lib.agoq.paper_tables` holds it against what AGoQ (arXiv 2605.00539) reports.

Tensor parallelism is with sequence parallelism: everything of a layer is divided by the number of ranks. GB are 10^9
bytes. Stages count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from dist_lib.agoq.bit_plan import LOWEST, BitPlan, LayerCost, Number, Rule, in_flight, make_bit_plan
from dist_lib.agoq.layer_memory import LAYOUTS, LayerShape, Layout, layer_cost, statistics_bytes
from dist_lib.models import DecoderConfig, parameter_counts

Width = Literal["fp32", "int8"]
ROUNDED = 1024  # tokens: sequences of an answer are multiples of it


@dataclass(frozen=True, kw_only=True)
class System:
    """What is stored how.

    Attributes:
        layout: of a layer's activations, see :data:`~dist_lib.agoq.layer_memory.LAYOUTS`.
        gradients: main gradients, in float32 or in 8 bits.
        moments: of Adam, in float32 or in 8 bits.
        sharded_optimizer: ZeRO-1: master weights and moments divided over the data-parallel ranks.
        rule: of the bits of stages; None: 4 everywhere. Only layouts that encode have bits.
        block: numbers that share a float32 scale, of activations and of gradients.
        moment_block: the same of moments.
        count_scales: whether activations' scales are counted; the paper's table 1 does not.
    """

    layout: Layout = "bf16"
    gradients: Width = "fp32"
    moments: Width = "fp32"
    sharded_optimizer: bool = False
    rule: Rule | None = None
    block: int = 128
    moment_block: int = 256
    count_scales: bool = True

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: allowed are {', '.join(LAYOUTS)}")
        for name in ("gradients", "moments"):
            if getattr(self, name) not in ("fp32", "int8"):
                raise ValueError(f"{name} {getattr(self, name)!r}: allowed are fp32, int8")
        if self.block < 1 or self.moment_block < 1:
            raise ValueError(f"blocks of {self.block} and {self.moment_block}: must be at least 1")

    @property
    def encodes(self) -> bool:
        """Whether activations are encoded with the bits of a plan."""
        return self.layout not in ("bf16", "coat")

    @property
    def scale_bits(self) -> Fraction:
        """Bits of scales that every encoded activation brings."""
        return Fraction(32, self.block) if self.count_scales else Fraction(0)

    def parameter_bytes(self, data_parallel: int = 1) -> dict[str, Fraction]:
        """Bytes of a parameter by kind: 18 in mixed precision, 12 with 8-bit moments, 9 with 8-bit gradients too."""
        shards = data_parallel if self.sharded_optimizer else 1
        moments = 8 if self.moments == "fp32" else 2 + Fraction(8, self.moment_block)
        return {
            "weights": Fraction(2),
            "gradients": Fraction(4) if self.gradients == "fp32" else 1 + Fraction(4, self.block),
            "master weights": Fraction(4, shards),
            "moments": Fraction(moments) / shards,
        }


_EIGHT = {"gradients": "int8", "moments": "int8"}
SYSTEMS: Mapping[str, System] = {
    "bf16": System(),
    "zero1": System(sharded_optimizer=True),
    "o": System(moments="int8"),
    "og": System(**_EIGHT),  # type: ignore[arg-type]
    "paper": System(layout="paper", **_EIGHT),  # type: ignore[arg-type]
    "shared": System(layout="shared", **_EIGHT),  # type: ignore[arg-type]
}
SYSTEM_NAMES: Mapping[str, str] = {
    "bf16": "mixed precision",
    "zero1": "with the optimizer sharded (ZeRO-1)",
    "o": "with 8-bit moments",
    "og": "with 8-bit moments and gradients",
    "paper": "AGoQ, the paper's layout",
    "shared": "AGoQ, attention's output shared",
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and over how many devices.

    Attributes:
        config: shape of the model; its layers divide evenly into stages times chunks.
        seq: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        micro_batches: of a step, on each data-parallel rank.
        tensor: ranks of tensor (and sequence) parallelism.
        stages: of the pipeline.
        chunks: of the model on a stage; more than one: interleaved.
        data: data-parallel ranks.
        logit_bytes: held for a logit at once: 2 (BF16) to 6 (with a float32 copy or gradient).
        shape: of a layer, if other than the model's.
    """

    config: DecoderConfig
    seq: int
    micro_batch: int = 1
    micro_batches: int = 8
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    data: int = 1
    logit_bytes: int = 6
    shape: LayerShape | None = None

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch", "micro_batches", "tensor", "stages", "chunks", "data", "logit_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.config.n_heads % self.tensor or self.config.d_ff % self.tensor:
            raise ValueError(
                f"tensor={self.tensor} does not divide {self.config.n_heads} heads and an MLP {self.config.d_ff} wide"
            )
        if self.config.n_layers % (self.stages * self.chunks):
            raise ValueError(
                f"{self.config.n_layers} layers do not divide evenly into {self.stages} stages of {self.chunks} chunks"
            )
        in_flight(self.stages, self.micro_batches, self.chunks)

    @property
    def stage_layers(self) -> int:
        """Layers on a stage."""
        return self.config.n_layers // self.stages

    @property
    def unit(self) -> Fraction:
        """Bytes of a BF16 tensor of the hidden size on one rank, divided by tensor parallelism; the paper's U."""
        return Fraction(2 * self.micro_batch * self.seq * self.config.d_model, self.tensor)

    def parameters(self, stage: int) -> Fraction:
        """Parameters of a stage on one rank; norms are not divided. A tied head has a copy on the last stage."""
        c, counts = self.config, parameter_counts(self.config)
        each = Fraction(counts.matrices, c.n_layers * self.tensor) + 2 * c.d_model
        total, table = each * self.stage_layers, Fraction(counts.embedding, self.tensor)
        if stage == 0:
            total += table
        if stage == self.stages - 1:
            total += c.d_model + (0 if c.tie_embeddings and self.stages == 1 else table)
        return total

    def head_bytes(self, stage: int) -> Fraction:
        """Logits and the two hidden tensors before them, on the last stage; one micro-batch at a time."""
        if stage != self.stages - 1:
            return Fraction(0)
        logits = Fraction(self.micro_batch * self.seq * self.config.vocab_size * self.logit_bytes, self.tensor)
        return logits + 2 * self.unit

    def cost(self, system: System) -> LayerCost:
        """Bytes of a layer for one micro-batch; statistics are in its fixed part."""
        shape = self.shape or LayerShape.of(self.config)
        units = layer_cost(system.layout, shape, scale_bits=system.scale_bits)
        beside = Fraction(statistics_bytes(self.config, self.micro_batch * self.seq), self.tensor)
        return LayerCost(units.fixed * self.unit + beside, units.coded * self.unit, units.scale_bits)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one device of a stage.

    Attributes:
        stage: from 0.
        in_flight: micro-batches (times chunks) held.
        bits: different bits of its layers; empty where nothing is encoded.
        parts: bytes by kind: weights, gradients, master weights, moments, activations, head.
    """

    stage: int
    in_flight: int
    bits: tuple[int, ...]
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(self.parts.values())


def beside_layers(training: Training, system: System) -> list[Fraction]:
    """Bytes of each stage beside activations: parameters, gradients, optimizer, head."""
    each = sum(system.parameter_bytes(training.data).values())
    return [training.parameters(s) * each + training.head_bytes(s) for s in range(training.stages)]


def plan_bits(training: Training, system: System, *, budget: int | None = None) -> BitPlan | None:
    """The bits of the system's rule, everything that the stages hold counted; None where there is no rule.

    Args:
        training: what is trained.
        system: with or without a rule.
        budget: bytes of a device, for the rule ``budget``; default: what the dearest stage needs with 4 bits.

    Raises:
        BudgetError: a stage that needs more than ``budget`` with 4 bits.
    """
    if system.rule is None or not system.encodes:
        return None
    t = training
    return make_bit_plan(
        system.rule,
        layers=t.config.n_layers,
        stages=t.stages,
        micro_batches=t.micro_batches,
        chunks=t.chunks,
        cost=t.cost(system),
        extra=beside_layers(t, system),
        budget=budget,
    )


def _activations(t: Training, system: System, plan: BitPlan | None, stage: int, recomputed: int) -> Number:
    cost, held = t.cost(system), in_flight(t.stages, t.micro_batches, t.chunks)[stage]
    layers, share = Fraction(t.stage_layers, t.chunks), Fraction(recomputed, t.stage_layers)
    if plan is None:
        most, kept = LOWEST, held * layers * cost.at(LOWEST)
    else:
        most = max(plan.stored_bits[i] for c in range(t.chunks) for i in plan.layers_of(stage, c))
        kept = plan.held(stage, cost)
    working = cost.at(most) if recomputed else 0  # the layer whose backward pass runs, computed again in full
    return (1 - share) * kept + share * held * layers * t.unit + working


def stage_memory(
    training: Training, system: System, *, recomputed: int = 0, budget: int | None = None
) -> tuple[StageMemory, ...]:
    """Bytes of a device of every stage.

    Args:
        training: what is trained.
        system: what is stored how.
        recomputed: layers of every stage of which only the input is kept (1 U) and that are computed again.
        budget: of a device, for the rule ``budget``.

    Raises:
        ValueError: more layers recomputed than a stage has.
        BudgetError: see :func:`plan_bits`.
    """
    if not 0 <= recomputed <= training.stage_layers:
        raise ValueError(f"recomputed={recomputed}: a stage has {training.stage_layers} layers")
    plan = plan_bits(training, system, budget=budget)
    found = []
    for s, held in enumerate(in_flight(training.stages, training.micro_batches, training.chunks)):
        parameters = training.parameters(s)
        parts = {k: round(parameters * b) for k, b in system.parameter_bytes(training.data).items()}
        parts["activations"] = round(_activations(training, system, plan, s, recomputed))
        parts["head"] = round(training.head_bytes(s))
        bits = plan.bits_of_stage(s) if plan is not None else (4,) if system.encodes else ()
        found.append(StageMemory(s, held, bits, parts))
    return tuple(found)


def peak(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most."""
    return max(stages, key=lambda m: m.total)


def _needs(training: Training, system: System, recomputed: int = 0) -> int:
    lowest = replace(system, rule=None) if system.rule == "budget" else system
    return peak(stage_memory(training, lowest, recomputed=recomputed)).total


def fewest_recomputed(training: Training, system: System, capacity: int) -> int | None:
    """The fewest layers of a stage to compute again so that all stages fit in ``capacity`` bytes; None: none do."""
    counts = range(training.stage_layers + 1)
    return next((r for r in counts if _needs(training, system, r) <= capacity), None)


def longest_sequence(training: Training, system: System, capacity: int, *, most: int = 2**24) -> int:
    """The longest sequence, a multiple of 1024 tokens up to ``most``, with which all stages fit; 0: none does.

    Nothing is recomputed; the rule ``budget`` may go down to 4 bits everywhere.
    """
    low, high = 0, most // ROUNDED  # low fits, beyond high is not asked
    while low < high:
        middle = (low + high + 1) // 2
        if _needs(replace(training, seq=middle * ROUNDED), system) <= capacity:
            low = middle
        else:
            high = middle - 1
    return low * ROUNDED


def fits(training: Training, system: System, capacity: int) -> bool:
    """Whether all stages fit in ``capacity`` bytes, nothing recomputed."""
    return _needs(training, system) <= capacity
