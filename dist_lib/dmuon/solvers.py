"""Balance: how many matrices of each shape every rank takes.

A :class:`Problem` knows shape classes, not names, and what k matrices of a class cost together on one rank; a solution
is one pattern (a count for each class) a rank. Ranks are interchangeable. Here are the bounds and the greedy methods;
the integer program is in :mod:`dist_lib.dmuon.milp`. All are deterministic, and none needs more than the standard
library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Pattern = tuple[int, ...]
_MARGIN = 1e-9  # relative: differences below it are rounding


@dataclass(frozen=True)
class Problem:
    """What is to be balanced.

    Attributes:
        totals: for each class, the least cost of 0, 1, ..., n matrices of it on one rank; never decreasing, and no
            more for j + k than for j and k apart.
        sizes: for each class, bytes of memory that an owner of one matrix needs.
        world: number of ranks.
    """

    totals: tuple[tuple[float, ...], ...]
    sizes: tuple[int, ...]
    world: int

    @cached_property
    def counts(self) -> Pattern:
        """Matrices of each class."""
        return tuple(len(t) - 1 for t in self.totals)

    def load(self, pattern: Sequence[int]) -> float:
        """Cost of one rank's matrices."""
        return sum(t[k] for t, k in zip(self.totals, pattern, strict=True))

    def size(self, pattern: Sequence[int]) -> int:
        """Bytes of one rank's matrices."""
        return sum(s * k for s, k in zip(self.sizes, pattern, strict=True))

    def makespan(self, patterns: Sequence[Pattern]) -> float:
        """Cost of the fullest rank."""
        return max(self.load(p) for p in patterns)


def lower_bound(problem: Problem) -> float:
    """A cost that no assignment goes below: the largest of three.

    The dearest single matrix; the mean load, each class batched as well as it can be; and for every k the k + 1
    cheapest of the k R + 1 dearest matrices, since some rank gets k + 1 of them (at their cost in the best batch).
    """
    used = [t for t in problem.totals if len(t) > 1]
    if not used:
        return 0.0
    largest = max(t[1] for t in used)
    mean = sum(t[-1] for t in used) / problem.world
    cheapest = [min(t[k] / k for k in range(1, len(t))) for t in used]
    each = sorted((c for c, t in zip(cheapest, used, strict=True) for _ in range(len(t) - 1)), reverse=True)
    crowded = 0.0
    for k in range(1, (len(each) - 1) // problem.world + 1):
        crowded = max(crowded, sum(each[k * problem.world - k : k * problem.world + 1]))
    return max(largest, mean, crowded * (1 - _MARGIN))


def lpt(problem: Problem) -> tuple[Pattern, ...]:
    """Dearest matrix first, each to the rank that is then least loaded (fewest bytes on a tie).

    Without a gain from batches this is Graham's rule: at most ``4/3 - 1/(3R)`` of the optimum.
    """
    kinds = [k for k in range(len(problem.totals)) if problem.counts[k]]
    kinds.sort(key=lambda k: (-problem.totals[k][1], -problem.sizes[k], k))
    held = [[0] * len(problem.totals) for _ in range(problem.world)]
    loads, sizes = [0.0] * problem.world, [0] * problem.world
    for kind in kinds:
        totals = problem.totals[kind]
        for _ in range(problem.counts[kind]):
            rank = min(
                range(problem.world),
                key=lambda r: (loads[r] + totals[held[r][kind] + 1] - totals[held[r][kind]], sizes[r], r),
            )
            loads[rank] += totals[held[rank][kind] + 1] - totals[held[rank][kind]]
            sizes[rank] += problem.sizes[kind]
            held[rank][kind] += 1
    return tuple(tuple(h) for h in held)


def _packed(problem: Problem, target: float) -> tuple[Pattern, ...]:
    """Units of the batch size that is cheapest a matrix among those that fit ``target``, placed by LPT."""
    units: list[tuple[float, int, int]] = []
    for kind, totals in enumerate(problem.totals):
        fitting = [k for k in range(1, len(totals)) if totals[k] <= target] or [1]
        size = min(fitting, key=lambda k: (round(totals[k] / k / (totals[1] or 1.0), 9), k)) if len(totals) > 1 else 1
        whole, rest = divmod(problem.counts[kind], size)
        units += [(totals[size], kind, size)] * whole + ([(totals[rest], kind, rest)] if rest else [])
    held = [[0] * len(problem.totals) for _ in range(problem.world)]
    loads = [0.0] * problem.world
    for cost, kind, size in sorted(units, key=lambda u: (-u[0], u[1], u[2])):
        rank = min(range(problem.world), key=lambda r: (loads[r], r))
        loads[rank] += cost
        held[rank][kind] += size
    return tuple(tuple(h) for h in held)


def greedy(problem: Problem) -> tuple[Pattern, ...]:
    """The best of LPT and of packing batches for targets that grow from the bound, improved by moves and swaps.

    Large batches shorten the sum and lengthen the longest item, so the batch size must depend on the number of ranks:
    hence the targets.
    """
    best = improve(problem, lpt(problem))
    bound, reached = lower_bound(problem), problem.makespan(best)
    target = bound
    while bound and target < reached and reached > bound * (1 + _MARGIN):
        found = improve(problem, _packed(problem, target))
        if problem.makespan(found) < reached * (1 - _MARGIN):
            best, reached = found, problem.makespan(found)
        target *= 1.05
    return best


def _exchanges(problem: Problem, a: Pattern, b: Pattern) -> list[tuple[Pattern, Pattern]]:
    """What two ranks hold after one matrix moves from ``a`` to ``b``, or two change places."""
    found = []
    kinds = range(len(a))
    for give in (k for k in kinds if a[k]):
        for take in (None, *(k for k in kinds if b[k] and k != give)):
            x, y = list(a), list(b)
            x[give] -= 1
            y[give] += 1
            if take is not None:
                x[take] += 1
                y[take] -= 1
            found.append((tuple(x), tuple(y)))
    return found


def improve(
    problem: Problem, patterns: Sequence[Pattern], *, budget: float | None = None, rounds: int = 400
) -> tuple[Pattern, ...]:
    """Moves and swaps from the fullest rank while they help.

    Args:
        problem: what is balanced.
        patterns: one for each rank.
        budget: None lowers the largest load. A cost lowers the largest number of bytes instead, with loads kept within
            the budget.
        rounds: at most so many exchanges.
    """
    held = list(patterns)

    def weight(pattern: Pattern) -> float:
        return problem.load(pattern) if budget is None else float(problem.size(pattern))

    for _ in range(rounds):
        full = max(range(len(held)), key=lambda r: (weight(held[r]), -r))
        before, best = weight(held[full]), None
        others = {held[r]: r for r in range(len(held) - 1, -1, -1) if r != full}
        for pattern, rank in sorted(others.items(), key=lambda item: (weight(item[0]), item[1]))[:64]:
            for x, y in _exchanges(problem, held[full], pattern):
                if budget is not None and max(problem.load(x), problem.load(y)) > budget * (1 + _MARGIN):
                    continue
                after = max(weight(x), weight(y))
                if after < before * (1 - _MARGIN) and (best is None or after < best[0]):
                    best = (after, rank, x, y)
        if best is None:
            break
        _, rank, held[full], held[rank] = best
    return tuple(held)
