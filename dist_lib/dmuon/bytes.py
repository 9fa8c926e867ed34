"""Bytes of one step, as integers, for DMuon in every mode and for what it is compared with.

The unit is the payload of :class:`~dist_lib.comm.CommCounter`: the bytes of the tensor that a rank hands to a
collective (a broadcast counts on every rank). Only matrices are counted; :func:`rest_payload` is for the other
parameters. What links carry is :func:`wire_share`, in multiples of all matrices' elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, get_args

from dist_lib.dmuon.layout import layer_of
from dist_lib.dmuon.plan import OwnerPlan

Mode = Literal[
    "replicated", "gather-keep", "gather-free", "all-to-all", "ddp", "fsdp-keep", "fsdp-free", "hsdp-keep", "hsdp-free"
]
MODES: Mapping[str, str] = MappingProxyType(
    {
        "replicated": "Muon on every rank, DDP",
        "gather-keep": "Muon on every rank, FSDP2, weights kept",
        "gather-free": "Muon on every rank, FSDP2, weights freed",
        "all-to-all": "whole matrices by all-to-all, FSDP2, weights freed",
        "ddp": "DMuon, DDP",
        "fsdp-keep": "DMuon, FSDP2, weights kept",
        "fsdp-free": "DMuon, FSDP2, weights freed",
        "hsdp-keep": "DMuon, HSDP, weights kept",
        "hsdp-free": "DMuon, HSDP, weights freed",
    }
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What sets the number of bytes besides the shapes.

    Attributes:
        weight: bytes of a weight as it is published or gathered.
        gradient: bytes of a gradient as it is reduced (half types that are summed in float32 count 4).
        master: bytes of a master weight as HSDP sends it to other replicas.
        micro_batches: forward-backward passes in a step; gradients are reduced after the last.
        unshards: times weights are spread in a step; None: once a micro-batch if kept after forward, twice if freed.
        shards: ranks in a shard group (HSDP); the other modes shard over the whole world.
    """

    weight: int = 4
    gradient: int = 4
    master: int = 4
    micro_batches: int = 1
    unshards: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        if min(self.weight, self.gradient, self.master, self.micro_batches) < 1 or (self.unshards or 1) < 1:
            raise ValueError(f"{self}: item sizes and numbers must be at least 1")

    def spread(self, mode: str) -> int:
        """Times weights are spread over the shard group in one step."""
        return self.unshards if self.unshards is not None else self.micro_batches * (1 if "keep" in mode else 2)

    def columns(self, world: int) -> int:
        """Ranks in a shard group.

        Raises:
            ValueError: a number that does not divide the world.
        """
        shards = world if self.shards is None else self.shards
        if shards < 1 or world % shards:
            raise ValueError(f"{shards} ranks in a shard group of {world}: give a divisor of the world size")
        return shards


def chunk_elements(shape: Sequence[int], world: int) -> int:
    """Elements of one rank's shard along dimension 0, padded as FSDP2 pads it: ``ceil(rows / R) * cols``."""
    rest = 1
    for n in shape[1:]:
        rest *= n
    return -(-shape[0] // world) * rest


def step_payload(mode: Mode, plan: OwnerPlan, sizes: Sizes | None = None) -> tuple[dict[str, int], ...]:
    """Payload bytes of each rank in one step, by operation; operations without bytes are left out.

    With P elements in all matrices, g and w bytes an element of gradients and weights, u spreads of the weights,
    S_c = sum of ``ceil(rows / R) cols`` over matrices:

    * replicated: all-reduce P g.
    * gather: all-gather u S_c w (weights) and S_c g (gradients); reduce-scatter R S_c g.
    * all-to-all: weights and reduce-scatter as above; S_c g to the owners, and R chunks w back for each matrix owned,
      owners being dealt out shape by shape.
    * ddp: reduce P g, broadcast P w. One rank broadcasts and reduces as well.
    * fsdp: reduce P g, broadcast u P w.
    * hsdp: the same in the shard group; and, for the P_c elements whose owners stand in this rank's column, reduce
      P_c g and broadcast P_c times the master's size over the replicas. Owner r stands in column ``r mod shards``.

    Raises:
        ValueError: an unknown mode or sizes that do not fit the world.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode {mode!r}: allowed are {', '.join(MODES)}")
    s, world = sizes or Sizes(), plan.world_size
    total = sum(plan.elements_per_rank)
    chunks = sum(chunk_elements(m.shape, world) for m in plan.matrices)
    spread, ranks = s.spread(mode), range(world)
    found: list[dict[str, int]]
    if mode == "replicated":
        found = [{"all_reduce": total * s.gradient} for _ in ranks]
    elif mode.startswith("gather"):
        gathered = spread * chunks * s.weight + chunks * s.gradient
        found = [{"all_gather": gathered, "reduce_scatter": world * chunks * s.gradient} for _ in ranks]
    elif mode == "all-to-all":
        back = _dealt(plan)
        found = [
            {
                "all_gather": spread * chunks * s.weight,
                "reduce_scatter": world * chunks * s.gradient,
                "all_to_all": chunks * s.gradient + world * back[r] * s.weight,
            }
            for r in ranks
        ]
    elif mode == "ddp":
        found = [{"reduce": total * s.gradient, "broadcast": total * s.weight} for _ in ranks]
    else:
        found = [{"reduce": total * s.gradient, "broadcast": spread * total * s.weight} for _ in ranks]
        if mode.startswith("hsdp"):
            columns = s.columns(world)
            own = column_elements(plan, columns)
            for r in ranks:
                found[r]["reduce"] += own[r % columns] * s.gradient
                found[r]["broadcast"] += own[r % columns] * s.master
    return tuple({op: n for op, n in f.items() if n} for f in found)


def _dealt(plan: OwnerPlan) -> list[int]:
    """Chunk elements of the matrices that each rank owns when equal shapes are dealt out in turn."""
    found, turn = [0] * plan.world_size, Counter[tuple[int, ...]]()
    for m in plan.matrices:
        found[turn[m.shape] % plan.world_size] += chunk_elements(m.shape, plan.world_size)
        turn[m.shape] += 1
    return found


def column_elements(plan: OwnerPlan, shards: int) -> tuple[int, ...]:
    """Elements whose owners have each place in their shard group (HSDP: ranks ``r`` with equal ``r mod shards``)."""
    each = plan.elements_per_rank
    return tuple(sum(each[r] for r in range(column, plan.world_size, shards)) for column in range(shards))


def rest_payload(numels: Sequence[int], world: int, *, weight: int = 4, gradient: int = 4) -> dict[str, int]:
    """Payload of the other parameters when each is cut into equal flat chunks, one a rank: every rank the same.

    With ``c = sum of ceil(n / R)``: reduce-scatter R c g, all-gather c w.
    """
    chunks = sum(-(-n // world) for n in numels)
    return {"reduce_scatter": world * chunks * gradient, "all_gather": chunks * weight} if chunks else {}


def wire_parts(mode: Mode, world: int, *, shards: int | None = None, micro_batches: int = 1) -> dict[str, Fraction]:
    """Elements that a rank sends in one step on average, in multiples of all matrices' elements, owners balanced.

    A rooted operation moves (R-1) P over R ranks: (R-1)/R P on average. In one pipelined broadcast every link carries
    nearly P, so a single hot root gains nothing from the average.

    Returns:
        Shares by purpose, ``"weights"`` (spread before they are used), ``"gradients"`` (reduced), ``"whole gradients"``
        (gathered again, or sent to owners and back), ``"replicas"`` (reduced and published between replicas).

    Source: DMuon's table of volumes (arXiv 2606.27153) for one micro-batch; HSDP and all-to-all are our derivation.

    Raises:
        ValueError: an unknown mode or shards that do not divide the world.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode {mode!r}: allowed are {', '.join(MODES)}")
    sizes = Sizes(micro_batches=micro_batches, shards=shards)
    whole = Fraction(world - 1, world)
    if mode == "replicated":
        return {"gradients": 2 * whole}
    if mode == "ddp":
        return {"weights": whole, "gradients": whole}
    if not mode.startswith("hsdp"):
        found = {"weights": sizes.spread(mode) * whole, "gradients": whole}
        if mode.startswith("gather"):
            found["whole gradients"] = whole
        elif mode == "all-to-all":  # each of two moves (R-1)/R of a rank's P / R
            found["whole gradients"] = 2 * whole / world
        return found
    group = sizes.columns(world)
    within, replicas = Fraction(group - 1, group), world // group
    between = 2 * Fraction(replicas - 1, replicas) / group
    return {"weights": sizes.spread(mode) * within, "gradients": within, "replicas": between}


def wire_share(mode: Mode, world: int, *, shards: int | None = None, micro_batches: int = 1) -> Fraction:
    """The sum of :func:`wire_parts`."""
    return sum(wire_parts(mode, world, shards=shards, micro_batches=micro_batches).values(), Fraction(0))


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one rank for matrices.

    Attributes:
        master: float32 weights that this rank keeps.
        momentum: float32 momentum.
        weights: whole matrices in the compute type, at most, at a time.
        gradients: whole gradients, at most, at a time, in the type in which they are reduced.
    """

    master: int
    momentum: int
    weights: int
    gradients: int

    @property
    def state(self) -> int:
        """What stays between steps."""
        return self.master + self.momentum

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.master + self.momentum + self.weights + self.gradients


def step_memory(mode: Mode, plan: OwnerPlan, sizes: Sizes | None = None) -> tuple[MemoryBytes, ...]:
    """Bytes of each rank. Freed weights, and gradients that are reduced in backward, count as the two largest layers.

    Gradients that add up over micro-batches, and those of replicated Muon, are held whole; a DMuon owner also holds
    the averaged ones of its matrices.

    Replicated ranks hold everything; sharded baselines 1/R (padded). A DMuon owner holds master and momentum of its
    matrices; under HSDP the master also stands on all replicas of the owner's column.

    Raises:
        ValueError: an unknown mode or sizes that do not fit the world.
    """
    step_payload(mode, plan, sizes)
    s, world = sizes or Sizes(), plan.world_size
    total, each = sum(plan.elements_per_rank), plan.elements_per_rank
    window = _two_layers(plan)
    weights = (total if mode in ("replicated", "ddp") or "keep" in mode else window) * s.weight
    gradients = (total if mode == "replicated" or s.micro_batches > 1 else window) * s.gradient
    owners = mode == "ddp" or mode.startswith(("fsdp", "hsdp"))
    found = []
    for r in range(world):
        master = momentum = 4 * each[r]
        if mode == "replicated":
            master = momentum = 4 * total
        elif mode.startswith("gather") or mode == "all-to-all":
            master = momentum = 4 * sum(chunk_elements(m.shape, world) for m in plan.matrices)
        elif mode.startswith("hsdp"):
            columns = s.columns(world)
            master = 4 * column_elements(plan, columns)[r % columns]
        found.append(MemoryBytes(master, momentum, weights, gradients + (each[r] * s.gradient if owners else 0)))
    return tuple(found)


def _two_layers(plan: OwnerPlan) -> int:
    layers: Counter[str] = Counter()
    for m in plan.matrices:
        layers[layer_of(m.name)] += m.numel
    return sum(n for _, n in layers.most_common(2))
