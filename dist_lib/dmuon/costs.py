"""What it costs an owner to update matrices: operations counted, times measured, or times from a device's rates.

A cost is a function of a shape and of how many equal matrices go through Newton-Schulz together. A batch never costs
more a matrix than its members alone, so :func:`best_splits` finds the cheapest way to cut ``k`` equal matrices into
batches; solvers see only that curve. Nothing here measures anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

from dist_lib.ops import newton_schulz_flops
from dist_lib.ops.newton_schulz import Form

Shape = tuple[int, ...]


def oriented(shape: Shape) -> tuple[int, int, int]:
    """``(m, n, count)`` with m <= n of a matrix (2-D) or of a stack of ``count`` equal matrices (3-D).

    Raises:
        ValueError: another number of dimensions or a size below 1.
    """
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise ValueError(
            f"shape {shape}: need a matrix (rows, cols) or a stack (count, rows, cols) with sizes of at least 1; "
            "reshape convolution kernels to (out, in * height * width)"
        )
    rows, cols = shape[-2:]
    return min(rows, cols), max(rows, cols), shape[0] if len(shape) == 3 else 1


@runtime_checkable
class Cost(Protocol):
    """A cost model. ``name`` and ``unit`` say what its numbers are."""

    @property
    def name(self) -> str:
        """Short name, such as ``"flops"``."""
        ...

    @property
    def unit(self) -> str:
        """``"FLOP"`` or ``"s"``."""
        ...

    def max_batch(self, shape: Shape) -> int:
        """Largest number of matrices of ``shape`` that may go together."""
        ...

    def of(self, shape: Shape, batch: int) -> float:
        """Cost of ``batch`` matrices of ``shape`` updated together."""
        ...


@dataclass(frozen=True)
class FlopCost:
    """Multiply-adds of Newton-Schulz, counted as two: exact, the m^3 term included; batches bring nothing.

    Attributes:
        form: ``"direct"``, ``"gram"`` or ``"auto"`` (the cheaper one for each shape).
        symmetric: whether symmetric products are computed as one triangle.
        steps: number of quintics.
        batch: largest batch that plans name.
    """

    form: Form = "auto"
    symmetric: bool = False
    steps: int = 5
    batch: int = 8

    name = "flops"
    unit = "FLOP"

    def max_batch(self, shape: Shape) -> int:
        """The same for every shape."""
        return self.batch

    def of(self, shape: Shape, batch: int) -> float:
        """Operations of ``batch`` updates."""
        m, n, count = oriented(shape)
        flops = newton_schulz_flops(m, n, steps=self.steps, form=self.form, symmetric=self.symmetric)
        return float(batch * count * flops)


@dataclass(frozen=True)
class DeviceCost:
    """Seconds from a device's rates: a fixed time a call, and operations at a rate that small shapes do not reach.

    A batch of b matrices of m rows fills ``min(1, b (m / full_rows)^2)`` of the device (our assumption; 0 for
    ``full_rows`` means that every shape fills it).

    Attributes:
        flops_per_s: sustained by matrices that fill the device.
        call_s: fixed time of one call.
        full_rows: rows from which one matrix fills the device.
        work: what is counted.
    """

    flops_per_s: float = 0.55 * 312e12
    call_s: float = 0.0
    full_rows: int = 0
    work: FlopCost = FlopCost(symmetric=True)

    name = "device"
    unit = "s"

    def __post_init__(self) -> None:
        if not self.flops_per_s > 0 or self.call_s < 0 or self.full_rows < 0:
            raise ValueError(f"{self}: need a rate above 0, and a time and rows of at least 0")

    def max_batch(self, shape: Shape) -> int:
        """That of ``work``."""
        return self.work.max_batch(shape)

    def of(self, shape: Shape, batch: int) -> float:
        """Seconds of one call for ``batch`` matrices."""
        m, _, count = oriented(shape)
        full = min(1.0, batch * count * (m / self.full_rows) ** 2) if self.full_rows else 1.0
        return self.call_s + self.work.of(shape, batch) / (self.flops_per_s * full)


@dataclass(frozen=True)
class MeasuredCost:
    """Times that were measured, by shape and batch; straight lines between measured batch sizes.

    Attributes:
        table: entries ``(m, n, ((batch, seconds), ...))`` with m <= n, sorted; see :meth:`from_mapping`.
    """

    table: tuple[tuple[int, int, tuple[tuple[int, float], ...]], ...]

    name = "measured"
    unit = "s"

    @staticmethod
    def from_mapping(times: Mapping[Shape, float | Mapping[int, float]]) -> MeasuredCost:
        """Build a table from ``{shape: seconds}`` or ``{shape: {batch: seconds}}``; a shape and its transpose are one.

        A larger batch counts at least as much as a smaller one: noise below that is lifted.

        Raises:
            ValueError: no shapes, the same shape twice, no time for a batch of one, a time that is not above 0.
        """
        found: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}
        for shape, value in times.items():
            m, n, count = oriented(tuple(shape))
            points = dict(value) if isinstance(value, Mapping) else {1: float(value)}
            bad = [f"{b}: {t}" for b, t in points.items() if b < 1 or not 0 < t < float("inf")]
            if count != 1 or (m, n) in found or 1 not in points or bad:
                raise ValueError(
                    f"measured times of shape {tuple(shape)}: {points}. Give each matrix shape (or its transpose) "
                    "once, with a finite time above 0 for batch 1 and for every other batch size"
                )
            lifted, least = [], 0.0
            for b, t in sorted(points.items()):
                least = max(least, float(t))
                lifted.append((b, least))
            found[m, n] = tuple(lifted)
        if not found:
            raise ValueError("the measured table is empty: give the time of at least one shape")
        return MeasuredCost(tuple((m, n, points) for (m, n), points in sorted(found.items())))

    def _points(self, shape: Shape) -> tuple[tuple[int, float], ...]:
        m, n, _ = oriented(shape)
        for rows, cols, points in self.table:
            if (rows, cols) == (m, n):
                return points
        known = ", ".join(f"{rows}x{cols}" for rows, cols, _ in self.table)
        raise ValueError(f"no measured time for {m}x{n}: the table has {known}; measure it or plan with cost='flops'")

    def max_batch(self, shape: Shape) -> int:
        """The largest measured batch (of whole stacks, for a 3-D shape)."""
        return max(1, self._points(shape)[-1][0] // oriented(shape)[2])

    def of(self, shape: Shape, batch: int) -> float:
        """Seconds of one call; a stack larger than any measured batch is run in several."""
        points, count = self._points(shape), batch * oriented(shape)[2]
        largest, time = points[-1]
        whole, rest = divmod(count, largest)
        return whole * time + (self._between(points, rest) if rest else 0.0)

    @staticmethod
    def _between(points: Sequence[tuple[int, float]], batch: int) -> float:
        for (b0, t0), (b1, t1) in pairwise(points):
            if b0 <= batch <= b1:
                return t0 + (t1 - t0) * (batch - b0) / (b1 - b0)
        return points[0][1]


def as_cost(cost: str | Cost | Mapping[Shape, float | Mapping[int, float]], *, max_batch: int = 8) -> Cost:
    """``"flops"``, a measured mapping or a :class:`Cost` as a :class:`Cost`.

    Raises:
        ValueError: another name, or a bad table.
    """
    if isinstance(cost, Mapping):
        return MeasuredCost.from_mapping(cost)
    if isinstance(cost, str):
        if cost != "flops":
            raise ValueError(f"cost {cost!r}: allowed are 'flops', a mapping of measured times, or a Cost")
        return FlopCost(batch=max_batch)
    return cost


def best_splits(cost: Cost, shape: Shape, count: int) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]:
    """Cheapest cost of 0, 1, ..., ``count`` matrices of one shape on one rank, and the batches that give it.

    Batches are in decreasing order; of equally cheap cuts the one with the larger batches is taken. A batch counts at
    least as much as a smaller one.
    """
    largest = max(1, min(cost.max_batch(shape), count))
    alone = list(accumulate((cost.of(shape, b) for b in range(1, largest + 1)), max))
    totals, splits = [0.0], [()]  # type: tuple[list[float], list[tuple[int, ...]]]
    for k in range(1, count + 1):
        best, chosen = float("inf"), 1
        for b in range(min(k, largest), 0, -1):
            value = totals[k - b] + alone[b - 1]
            if value < best * (1 - 1e-12):
                best, chosen = value, b
        totals.append(best)
        splits.append(tuple(sorted((*splits[k - chosen], chosen), reverse=True)))
    return tuple(totals), tuple(splits)
