"""Times of an optimizer step from shapes, operations and bandwidths, held against published ones.

The model: every rank's Newton-Schulz, or the fullest owner's; memory traffic of the update; a gather of gradients over
the network of a node; one fixed time. The rates of :class:`Hardware` are assumptions about A800 machines, two of them
(the gather's bandwidth, the fixed time) fitted to the published times themselves, so agreement there is a description,
not a prediction. It is a model: nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dist_lib.comm import NetworkModel
from dist_lib.dmuon.costs import Cost, DeviceCost, FlopCost, MeasuredCost, oriented
from dist_lib.dmuon.plan import MatrixSpec, Method, OwnerPlan, make_plan
from dist_lib.dmuon.published import A800_TIMES, PUBLISHED, Published
from dist_lib.dmuon.workloads import shape_counts, workload
from dist_lib.models import CONFIGS, parameter_counts
from dist_lib.ops import newton_schulz_flops


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of a machine.

    Attributes:
        peak_flops: bf16 or fp16, per second; A800: 312e12.
        direct_use: share of it that plain matrix products reach.
        symmetric_use: share that the triangle kernel reaches, of the operations that it does.
        memory_bytes_per_s: sustained by element-wise updates.
        node_bytes_per_s: effective, of a node, gathering gradients; fitted (76 % of 200 Gb/s).
        fixed_s: of an owner's step: launches, small parameters, publishing; fitted.
        gpus_per_node: a gather inside one node counts as free.
    """

    peak_flops: float = 312e12
    direct_use: float = 0.60
    symmetric_use: float = 0.55
    memory_bytes_per_s: float = 1.5e12
    node_bytes_per_s: float = 19e9
    fixed_s: float = 7e-3
    gpus_per_node: int = 8

    def direct_cost(self) -> DeviceCost:
        """Newton-Schulz in the direct form with plain products."""
        return DeviceCost(self.direct_use * self.peak_flops, work=FlopCost(form="direct"))

    def owned_cost(self, *, batch: int = 8) -> DeviceCost:
        """Newton-Schulz in Gram space with symmetric products, as the paper's owners run it."""
        return DeviceCost(self.symmetric_use * self.peak_flops, work=FlopCost(form="gram", symmetric=True, batch=batch))


MUON_BYTES, ADAMW_BYTES = 22, 30  # touched an element: gradient, state and master read and written, bf16 weight written


@dataclass(frozen=True)
class OptimizerTimes:
    """Modelled seconds of an optimizer step.

    Attributes:
        every_rank: Newton-Schulz of all matrices, direct form: what a rank that owns nothing in particular does.
        gather: bringing whole gradients to every rank, beyond one node.
        owned: Newton-Schulz of the fullest owner.
        floor: no plan's fullest owner is faster.
        memory: element-wise work of the fullest owner and of AdamW on the sharded rest.
        fixed: see :class:`Hardware`.
    """

    every_rank: float
    gather: float
    owned: float
    floor: float
    memory: float
    fixed: float

    @property
    def gathering(self) -> float:
        """Optimizer of the baseline that gathers gradients and updates everything everywhere."""
        return self.every_rank + self.gather

    @property
    def dmuon(self) -> float:
        """Optimizer of owners."""
        return self.owned + self.memory + self.fixed

    @property
    def speedup(self) -> float:
        """Baseline over owners."""
        return self.gathering / self.dmuon


def optimizer_times(
    model: str,
    world: int,
    *,
    hardware: Hardware | None = None,
    gradient_bytes: int = 2,
    method: Method = "lpt",
    cost: Cost | None = None,
) -> OptimizerTimes:
    """Model an optimizer step.

    Args:
        model: a name of :data:`~dist_lib.dmuon.workloads.WORKLOADS`.
        world: data-parallel ranks.
        hardware: default: A800 machines.
        gradient_bytes: of an element that the baseline gathers.
        method: of the plan.
        cost: of an owner's Newton-Schulz, in seconds; default: from ``hardware``.

    Raises:
        KeyError: an unknown model.
        ValueError: a world below 1, or a cost that is not in seconds.
    """
    hw, specs = hardware or Hardware(), workload(model)
    owned = cost or hw.owned_cost()
    if owned.unit != "s":
        raise ValueError(f"cost {owned.name!r} is in {owned.unit}: times need a cost in seconds")
    plan = make_plan(specs, world, method=method, cost=owned)
    rest = parameter_counts(CONFIGS[model]).total - sum(m.numel for m in specs) if model in CONFIGS else 0
    return times_of_plan(plan, cost=owned, rest=rest, hardware=hw, gradient_bytes=gradient_bytes)


def times_of_plan(
    plan: OwnerPlan, *, cost: Cost, rest: int = 0, hardware: Hardware | None = None, gradient_bytes: int = 2
) -> OptimizerTimes:
    """Model an optimizer step under a plan.

    Args:
        plan: owners and batches.
        cost: of an owner's Newton-Schulz, in seconds.
        rest: elements of other parameters, which AdamW updates, sharded evenly.
        hardware: default: A800 machines.
        gradient_bytes: of an element that the baseline gathers.
    """
    hw, world = hardware or Hardware(), plan.world_size
    direct, loads = hw.direct_cost(), plan.loads(cost)
    elements = sum(plan.elements_per_rank)
    traffic = MUON_BYTES * max(plan.elements_per_rank) + ADAMW_BYTES * rest / world
    return OptimizerTimes(
        every_rank=sum(direct.of(m.shape, 1) for m in plan.matrices),
        gather=elements * gradient_bytes / hw.node_bytes_per_s if world > hw.gpus_per_node else 0.0,
        owned=max(loads),
        floor=plan.lower_bound if plan.unit == "s" else sum(loads) / world,
        memory=traffic / hw.memory_bytes_per_s,
        fixed=hw.fixed_s,
    )


@dataclass(frozen=True)
class Row:
    """One published number beside ours.

    Attributes:
        published: the number and where it stands.
        modelled_ms: ours.
        how: what was added up.
    """

    published: Published
    modelled_ms: float
    how: str

    @property
    def error(self) -> float:
        """Modelled over published, less one."""
        return self.modelled_ms / self.published.milliseconds - 1


_FP32_GATHER = ("wallx", "pi0")  # assumption: one bandwidth fits all rows if these two gather float32 gradients


@lru_cache(maxsize=8)
def reproduction_table(hardware: Hardware | None = None) -> tuple[Row, ...]:
    """Every published time that the model covers, with ours; AdamW's own times are inputs, not rows.

    Steps are AdamW's published step plus the modelled optimizer: no overlap, no exposed communication.
    """
    adamw = {(p.model, p.world): p.milliseconds for p in PUBLISHED if p.system == "adamw" and p.quantity == "step"}
    rows = []
    for p in PUBLISHED:
        if p.system == "adamw":
            continue
        width = 4 if p.model in _FP32_GATHER else 2
        t = optimizer_times(p.model, p.world, hardware=hardware, gradient_bytes=width)
        seconds, how = {
            "gather": (t.gathering, "all matrices + gather"),
            "ddp": (t.every_rank, "all matrices"),
            "naive-replay": (t.every_rank, "all matrices"),
            "owned-replay": (t.owned, "fullest owner"),
            "dmuon": (t.dmuon, "fullest owner + memory + fixed"),
        }[p.system]
        base = adamw[p.model, p.world] if p.quantity == "step" else 0.0
        rows.append(Row(p, 1e3 * seconds + base, how if p.quantity == "optimizer" else f"AdamW's step + {how}"))
    return tuple(rows)


@dataclass(frozen=True)
class BalanceRow:
    """How a plan fares on a number of ranks.

    Attributes:
        world: ranks.
        largest, mean, floor: load of the fullest rank, mean load, and proven bound; units of the cost.
        largest_bytes: state of the rank with the most.
        matrix_floor: cost of the dearest single matrix.
    """

    world: int
    largest: float
    mean: float
    floor: float
    largest_bytes: int
    matrix_floor: float

    @property
    def balance(self) -> float:
        """Largest over mean."""
        return self.largest / self.mean

    @property
    def saturated(self) -> bool:
        """Whether one matrix sets the time, so that more ranks or a better plan bring nothing."""
        return self.largest <= self.matrix_floor * (1 + 1e-6)


def balance_table(
    specs: Sequence[MatrixSpec], worlds: Sequence[int], *, method: Method = "lpt", cost: Cost | None = None
) -> tuple[BalanceRow, ...]:
    """Plans of the same matrices on several numbers of ranks; ``cost`` defaults to the paper's kernels on an A800."""
    model = cost or Hardware().owned_cost()
    dearest = max((model.of(m.shape, 1) for m in specs), default=0.0)
    rows = []
    for world in worlds:
        plan = make_plan(specs, world, method=method, cost=model)
        mean = sum(plan.rank_loads) / world
        rows.append(BalanceRow(world, max(plan.rank_loads), mean, plan.lower_bound, max(plan.bytes_per_rank), dearest))
    return tuple(rows)


def saturation_ranks(specs: Sequence[MatrixSpec], cost: Cost | None = None) -> float:
    """Ranks beyond which the dearest matrix alone sets the time: all costs over the largest one.

    Raises:
        ValueError: no matrices.
    """
    if not specs:
        raise ValueError("no matrices: there is nothing to saturate")
    model = cost or Hardware().owned_cost()
    each = [model.of(m.shape, 1) for m in specs]
    return sum(each) / max(each)


def split_seconds(
    shape: Sequence[int], parts: int, *, hardware: Hardware | None = None, network: NetworkModel | None = None
) -> float:
    """Seconds of one matrix's Newton-Schulz with its long side cut over ``parts`` ranks; the better of both forms.

    Products with the wide matrix shrink by ``parts``; products of m x m factors do not, and every Gram matrix is summed
    over the ranks in half precision. Our derivation: a lower bar than cutting those products too.

    Args:
        shape: of the matrix.
        parts: ranks.
        hardware: rates; default: A800.
        network: between these ranks; default: 200 GB/s and 20 microseconds (inside a node).

    Raises:
        ValueError: parts below 1.
    """
    if parts < 1:
        raise ValueError(f"parts {parts}: must be at least 1")
    hw, net = hardware or Hardware(), network or NetworkModel(20e-6, 200e9)
    m, n, _ = oriented(tuple(shape))
    rate = hw.symmetric_use * hw.peak_flops
    found = []
    for form, sums in (("direct", 5), ("gram", 2)):
        # All products are a m^2 n + b m^3: two evaluations give a and b.
        one = newton_schulz_flops(m, m, form=form, symmetric=True)  # type: ignore[arg-type]
        two = newton_schulz_flops(m, 2 * m, form=form, symmetric=True)  # type: ignore[arg-type]
        wide, square = (two - one) / m**3, (2 * one - two) / m**3
        flops = wide * m * m * n / parts + square * m**3
        found.append(flops / rate + (sums * net.all_reduce(2 * m * m, parts) if parts > 1 else 0.0))
    return min(found)


@dataclass(frozen=True)
class Remedy:
    """Something that might shorten the fullest owner's time.

    Attributes:
        name: what is done.
        seconds: proven bound on the fullest owner then (mean, or dearest unit).
        limited_by: ``"mean"`` or the shape that sets it.
    """

    name: str
    seconds: float
    limited_by: str


def remedies(specs: Sequence[MatrixSpec], world: int, *, hardware: Hardware | None = None) -> tuple[Remedy, ...]:
    """What the floor would be with perfect balance, twice the ranks, a kernel 1.5 times as fast, or a cut matrix.

    The last cuts every matrix of the dearest shape over 2, 4 or 8 ranks, whichever is best; such a matrix occupies all
    its ranks for as long as it takes.

    Raises:
        ValueError: a world below 1 or no matrices.
    """
    if world < 1 or not specs:
        raise ValueError(f"{world} ranks, {len(specs)} matrices: need at least one of each")
    hw = hardware or Hardware()
    cost = hw.owned_cost()
    alone = {m.shape: cost.of(m.shape, 1) for m in specs}
    dearest = max(alone.values())

    def floor(name: str, ranks: int, speed: float = 1.0, parts: int = 1) -> Remedy:
        longest, work = {}, 0.0
        for shape, count in shape_counts(specs).items():
            seconds, used = alone[shape] / speed, 1
            if parts > 1 and alone[shape] == dearest:
                seconds, used = split_seconds(shape, parts, hardware=hw), parts
            longest[shape] = seconds
            work += used * count * seconds
        shape = max(longest, key=lambda s: (longest[s], s))
        limit = "mean" if work / ranks >= longest[shape] else "x".join(map(str, shape))
        return Remedy(name, max(work / ranks, longest[shape]), limit)

    cuts = [floor(f"dearest shape cut over {p} ranks", world, parts=p) for p in (2, 4, 8)]
    return (
        floor("perfect balance", world),
        floor("twice the ranks", 2 * world),
        floor("kernel 1.5 times as fast", world, speed=1.5),
        min(cuts, key=lambda r: r.seconds),
    )


class LayerTimes(NamedTuple):
    """When one layer's weights travel and when it computes, in seconds from the start of the forward pass."""

    send_begin: float
    send_end: float
    compute_begin: float
    compute_end: float


def overlap(
    plan: OwnerPlan, layers: Sequence[Sequence[str]], compute_s: float, network: NetworkModel, *, itemsize: int = 2
) -> tuple[LayerTimes, ...]:
    """Forward pass with published weights fetched one layer ahead: a layer's travel while the one before it computes.

    Owners of one layer send at once through one link of each receiver, so a layer's broadcasts take as long as all its
    bytes; the first layer has nothing to hide behind.

    Args:
        plan: owners.
        layers: names of each layer's matrices, in the order of use.
        compute_s: seconds of one layer's forward pass.
        network: one rank's link.
        itemsize: of a published weight.
    """
    numel = {m.name: m.numel for m in plan.matrices}
    found: list[LayerTimes] = []
    for names in layers:
        took = network.broadcast(itemsize * sum(numel[n] for n in names), plan.world_size)
        sent = found[-1].compute_begin if found else 0.0
        begin = max(sent + took, found[-1].compute_end if found else 0.0)
        found.append(LayerTimes(sent, sent + took, begin, begin + compute_s))
    return tuple(found)


def exposed_seconds(
    plan: OwnerPlan, layers: Sequence[Sequence[str]], compute_s: float, network: NetworkModel, *, itemsize: int = 2
) -> float:
    """Waiting for published weights: ``sum over layers of max(0, t_broadcast(l) - t_compute(l - 1))``.

    What :func:`overlap` leaves of the forward pass besides computing; arguments as there.
    """
    times = overlap(plan, layers, compute_s, network, itemsize=itemsize)
    free = [0.0, *(t.compute_end for t in times)]
    return sum(t.compute_begin - before for t, before in zip(times, free, strict=False))


def a800_cost(fallback: Hardware | None = None, specs: Sequence[MatrixSpec] = ()) -> MeasuredCost:
    """The authors' times of one matrix on an A800; shapes that they did not list are modelled from ``fallback``."""
    model = (fallback or Hardware()).owned_cost()
    times: dict[tuple[int, ...], float] = dict(A800_TIMES)
    for spec in specs:
        m, n, _ = oriented(spec.shape)
        times.setdefault((m, n), model.of((m, n), 1))
    return MeasuredCost.from_mapping(times)
