"""The owner plan: who updates which matrix, decided once, before training, and identical on every rank.

It is pure data: names, shapes, owners, the batches in which an owner orthogonalises equal shapes, and how well the
loads are balanced against what no plan could beat. It comes from names and shapes alone, in any order, so every rank
computes the same one; compare it across ranks with :func:`dist_lib.comm.agree` before acting on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

from dist_lib.dmuon.costs import Cost, Shape, as_cost, best_splits, oriented
from dist_lib.dmuon.layout import assign_names, natural_key, rank_of_slot
from dist_lib.dmuon.solvers import Pattern, Problem, greedy, improve, lower_bound, lpt

Method = Literal["milp", "lpt", "round_robin", "rank0"]
STATE_BYTES = 8  # an owner holds float32 master weights and float32 momentum


class HasShape(Protocol):
    """A tensor, or anything else with a shape."""

    @property
    def shape(self) -> Any:
        """Sizes of the dimensions."""
        ...


@dataclass(frozen=True, order=True)
class MatrixSpec:
    """Name and shape of a matrix (or of a 3-D stack of equal matrices).

    Raises:
        ValueError: an empty name, or a shape that is neither.
    """

    name: str
    shape: Shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if not self.name:
            raise ValueError(f"a matrix of shape {self.shape} has no name: plans are keyed by name")
        oriented(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        m, n, count = oriented(self.shape)
        return m * n * count


@dataclass(frozen=True)
class OwnerPlan:
    """Who owns what.

    Attributes:
        world_size: number of ranks.
        method: how it was found: ``"milp"``, ``"lpt"``, ``"round_robin"``, ``"rank0"`` or ``"given"``.
        entries: ``(name, shape, owner)``, names in natural order.
        batches: names of equal shapes on one owner that go through Newton-Schulz together; every name once.
        cost: name of the cost model, and ``unit`` of its numbers.
        rank_loads: planned cost of each rank.
        lower_bound: no plan's fullest rank costs less than this.
    """

    world_size: int
    method: str
    entries: tuple[tuple[str, Shape, int], ...]
    batches: tuple[tuple[str, ...], ...]
    cost: str
    unit: str
    rank_loads: tuple[float, ...]
    lower_bound: float

    def __post_init__(self) -> None:
        names = [name for name, _, _ in self.entries]
        outside = [f"{name} -> {owner}" for name, _, owner in self.entries if not 0 <= owner < self.world_size]
        if self.world_size < 1 or outside:
            raise ValueError(
                f"owners outside of {self.world_size} ranks: {', '.join(outside[:5]) or 'no ranks at all'}"
            )
        batched = sorted(name for batch in self.batches for name in batch)
        if len(set(names)) != len(names) or batched != sorted(names) or len(self.rank_loads) != self.world_size:
            raise ValueError("a plan names every matrix once, in its entries and in its batches, and every rank's load")
        for batch in self.batches:
            if len({self._entry[name] for name in batch}) != 1:
                raise ValueError(f"the batch {batch} mixes shapes or owners")

    @cached_property
    def _entry(self) -> dict[str, tuple[Shape, int]]:
        return {name: (shape, owner) for name, shape, owner in self.entries}

    @property
    def owners(self) -> Mapping[str, int]:
        """Owner of each name."""
        return MappingProxyType({name: owner for name, _, owner in self.entries})

    @cached_property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        """All matrices, names in natural order."""
        return tuple(MatrixSpec(name, shape) for name, shape, _ in self.entries)

    def owner(self, name: str) -> int:
        """Rank that owns ``name``.

        Raises:
            KeyError: a name that the plan does not have.
        """
        if name not in self._entry:
            raise KeyError(f"the owner plan has no matrix {name!r}; it has {len(self.entries)}, such as {self._few()}")
        return self._entry[name][1]

    def _few(self) -> str:
        return ", ".join(name for name, _, _ in self.entries[:3]) or "none at all"

    def owned_by(self, rank: int) -> tuple[MatrixSpec, ...]:
        """Matrices of one rank, in natural order; may be empty.

        Raises:
            ValueError: a rank outside the plan.
        """
        self._check_rank(rank)
        return tuple(MatrixSpec(name, shape) for name, shape, owner in self.entries if owner == rank)

    def batches_of(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """The batches of one rank.

        Raises:
            ValueError: a rank outside the plan.
        """
        self._check_rank(rank)
        return tuple(b for b in self.batches if self._entry[b[0]][1] == rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: the plan is for ranks 0 to {self.world_size - 1}")

    def loads(self, cost: str | Cost | Mapping[Shape, Any] | None = None) -> tuple[float, ...]:
        """Cost of each rank; with another ``cost`` than the planned one, that of the plan's own batches."""
        if cost is None:
            return self.rank_loads
        model, found = as_cost(cost), [0.0] * self.world_size
        for batch in self.batches:
            shape, owner = self._entry[batch[0]]
            found[owner] += model.of(shape, len(batch))
        return tuple(found)

    @property
    def balance(self) -> float:
        """Largest load over the mean load; 1 is perfect, the number of ranks is the worst."""
        mean = sum(self.rank_loads) / self.world_size
        return max(self.rank_loads) / mean if mean else 1.0

    @property
    def above_bound(self) -> float:
        """Largest load over :attr:`lower_bound`; 1 is proven optimal."""
        return max(self.rank_loads) / self.lower_bound if self.lower_bound else 1.0

    @property
    def elements_per_rank(self) -> tuple[int, ...]:
        """Elements of each rank's matrices."""
        found = [0] * self.world_size
        for matrix, (_, _, owner) in zip(self.matrices, self.entries, strict=True):
            found[owner] += matrix.numel
        return tuple(found)

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of each owner's state, which is float32 master weights and float32 momentum."""
        return tuple(STATE_BYTES * n for n in self.elements_per_rank)

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self), indent=None, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> OwnerPlan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ValueError: text that is no plan, or an inconsistent one.
        """
        try:
            data = json.loads(text)
            data["entries"] = tuple((str(n), tuple(map(int, s)), int(o)) for n, s, o in data["entries"])
            data["batches"] = tuple(tuple(map(str, b)) for b in data["batches"])
            data["rank_loads"] = tuple(map(float, data["rank_loads"]))
            return OwnerPlan(**data)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not an owner plan written by to_json(): {error}") from error


Matrices = Iterable[MatrixSpec | tuple[str, HasShape] | tuple[str, Sequence[int]]]


def matrix_specs(matrices: Matrices) -> tuple[MatrixSpec, ...]:
    """Specs of matrices or (name, tensor or shape) pairs, in natural order of their names.

    Raises:
        ValueError: a name that occurs twice, or a shape that is no matrix.
    """
    specs = []
    for item in matrices:
        if not isinstance(item, MatrixSpec):
            name, thing = item
            sizes: Any = getattr(thing, "shape", thing)
            item = MatrixSpec(name, tuple(sizes))
        specs.append(item)
    specs.sort(key=lambda s: (natural_key(s.name), s.name))
    twice = sorted({a.name for a, b in pairwise(specs) if a.name == b.name})
    if twice:
        raise ValueError(f"these names occur more than once: {', '.join(twice[:5])}; name a tied weight once")
    return tuple(specs)


def make_plan(
    matrices: Matrices,
    world_size: int,
    *,
    method: Method = "lpt",
    cost: str | Cost | Mapping[Shape, Any] = "flops",
    owners: Mapping[str, int] | None = None,
    nodes: int = 1,
    max_batch: int = 8,
    memory_slack: float = 0.0,
    gap: float = 1e-3,
    time_limit_s: float | None = None,
) -> OwnerPlan:
    """Decide who owns what.

    Args:
        matrices: specs or (name, tensor) or (name, shape) pairs, in any order.
        world_size: number of ranks; more ranks than matrices is fine.
        method: ``"milp"`` (integer program, never worse than the greedy ones; needs SciPy), ``"lpt"`` (dearest first),
            ``"round_robin"`` (Eq. 3 of the paper over nodes and GPUs, blind to cost) or ``"rank0"``.
        cost: ``"flops"``; measured ``{shape: seconds}`` or ``{shape: {batch: seconds}}`` (equal on all ranks: measure
            on one and broadcast); or a :class:`Cost`.
        owners: owners chosen by the caller, for every name; then ``method`` does not matter.
        nodes: ranks are numbered node by node; must divide ``world_size``.
        max_batch: largest batch with ``cost="flops"``; other costs know their own.
        memory_slack: after the fullest rank's load is settled, the largest state in bytes is lowered, and loads may
            grow by this share for it. Only with ``"milp"`` and ``"lpt"``.
        gap: ``"milp"`` stops this close, relatively, to the proven bound.
        time_limit_s: wall-clock limit of ``"milp"``; the result then depends on the machine, so make the plan on one
            rank and broadcast it. Without it the search is limited by counts and repeats exactly.

    Raises:
        ValueError: a bad world size, method, name, owner, table or number.
        ModuleNotFoundError: ``"milp"`` without SciPy.

    Source: DMuon (arXiv 2606.27153) Eq. 5 for the balance and Eq. 3 for the layout; bounds and patterns are ours.
    """
    if method not in get_args(Method):
        raise ValueError(f"method {method!r}: allowed are {', '.join(get_args(Method))}, or give owners=")
    if world_size < 1 or nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks on {nodes} nodes: need at least one rank, the same number on every node")
    if max_batch < 1 or memory_slack < 0 or gap < 0:
        raise ValueError(f"max_batch {max_batch}, memory_slack {memory_slack}, gap {gap}: need >= 1, >= 0 and >= 0")
    specs = matrix_specs(matrices)
    model = as_cost(cost, max_batch=max_batch)
    shapes = sorted({s.shape for s in specs})
    kind = {shape: k for k, shape in enumerate(shapes)}
    curves = [best_splits(model, s, sum(m.shape == s for m in specs)) for s in shapes]
    sizes = tuple(STATE_BYTES * MatrixSpec("one", s).numel for s in shapes)
    problem = Problem(tuple(totals for totals, _ in curves), sizes, world_size)
    bound = lower_bound(problem)
    if owners is not None:
        chosen, method_name = _given(specs, owners, world_size), "given"
    elif method in ("rank0", "round_robin"):
        gpus = world_size // nodes
        at = [0 if method == "rank0" else rank_of_slot(w, nodes, gpus) for w in range(len(specs))]
        chosen, method_name = {s.name: r for s, r in zip(specs, at, strict=True)}, method
    else:
        patterns: Sequence[Pattern] = lpt(problem)
        if method == "milp":
            from dist_lib.dmuon.milp import solve  # here: needs SciPy, an extra

            patterns, bound = solve(problem, start=greedy(problem), gap=gap, time_limit_s=time_limit_s)
        patterns = improve(problem, patterns, budget=problem.makespan(patterns) * (1 + memory_slack))
        quotas = _spread(problem, patterns, nodes)
        chosen, method_name = assign_names([(s.name, kind[s.shape]) for s in specs], quotas, nodes=nodes), method
    return _build(specs, chosen, world_size, method_name, model, bound, [splits for _, splits in curves], kind)


def _spread(problem: Problem, patterns: Sequence[Pattern], nodes: int) -> list[Pattern]:
    """Equal patterns apart from each other: in the order of their loads, the i-th goes to the i-th slot."""
    quotas = list(patterns)
    for w, pattern in enumerate(sorted(patterns, key=lambda p: (-problem.load(p), p))):
        quotas[rank_of_slot(w, nodes, problem.world // nodes)] = pattern
    return quotas


def _given(specs: Sequence[MatrixSpec], owners: Mapping[str, int], world_size: int) -> dict[str, int]:
    names = {s.name for s in specs}
    missing, unknown = sorted(names - set(owners)), sorted(set(owners) - names)
    outside = sorted(f"{n} -> {r}" for n, r in owners.items() if not 0 <= r < world_size)
    if missing or unknown or outside:
        raise ValueError(
            f"owners must name every matrix once, with ranks 0 to {world_size - 1}; missing: {missing[:5]}, "
            f"unknown: {unknown[:5]}, outside: {outside[:5]}"
        )
    return {n: int(r) for n, r in owners.items()}


def _build(
    specs: Sequence[MatrixSpec],
    owners: Mapping[str, int],
    world_size: int,
    method: str,
    model: Cost,
    bound: float,
    splits: Sequence[Sequence[tuple[int, ...]]],
    kind: Mapping[Shape, int],
) -> OwnerPlan:
    together: dict[tuple[int, Shape], list[str]] = {}
    for spec in specs:
        together.setdefault((owners[spec.name], spec.shape), []).append(spec.name)
    batches, loads = [], [0.0] * world_size
    for (rank, shape), names in sorted(together.items()):
        at = 0
        for size in splits[kind[shape]][len(names)]:
            batches.append(tuple(names[at : at + size]))
            loads[rank] += model.of(shape, size)
            at += size
    return OwnerPlan(
        world_size=world_size,
        method=method,
        entries=tuple((s.name, s.shape, owners[s.name]) for s in specs),
        batches=tuple(batches),
        cost=model.name,
        unit=model.unit,
        rank_loads=tuple(_round(x) for x in loads),
        lower_bound=_round(bound),
    )


def _round(value: float) -> float:
    """Ten digits: the last bits of a solver's sums may depend on the machine, and ranks compare plans."""
    return float(f"{value:.10g}")
