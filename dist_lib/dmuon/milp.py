"""The integer program of the owner plan, over patterns instead of named ranks.

A pattern is what one rank takes: a count for each shape class. Ranks are interchangeable, so the program asks how many
ranks take each pattern; naming ranks would multiply every solution by their permutations and stall the solver. For a
target T on the fullest rank the linear relaxation, with patterns generated as they are needed, either proves that T
cannot be met (which raises the bound) or supplies patterns for SciPy's HiGHS to combine. T is found by bisection.

The program is that of DMuon (arXiv 2606.27153, eq. 5), batches decided jointly with owners; patterns and the proof of
the bound are our derivation (Gilmore and Gomory's column generation). Needs SciPy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from dist_lib.dmuon.solvers import Pattern, Problem, improve, lower_bound

_CELLS = 8192  # of the knapsack that finds patterns; costs are rounded down, so that bounds stay valid
_ALL = 2000  # up to this many patterns are listed instead of generated: then the search is exact
_MARGIN = 1e-9


def _scipy() -> tuple[ModuleType, Any]:
    try:
        import scipy.optimize as optimize
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ModuleNotFoundError(
            "the 'milp' plan needs SciPy: pip install 'dist-lib[dmuon]', or use method='lpt', which needs nothing more"
        ) from error
    return optimize, csr_array


def all_patterns(problem: Problem, target: float, *, limit: int = _ALL) -> list[Pattern] | None:
    """Every pattern within ``target`` to which no matrix can be added; None if there are more than ``limit``."""
    found: list[Pattern] = []
    kinds = len(problem.counts)
    budget, calls = target * (1 + _MARGIN), 0

    def extend(prefix: list[int], load: float) -> bool:
        nonlocal calls
        calls += 1
        if calls > 40 * limit:
            return False
        kind = len(prefix)
        if kind == kinds:
            for k, totals in enumerate(problem.totals):
                room = budget - load + totals[prefix[k]]
                if prefix[k] < problem.counts[k] and totals[prefix[k] + 1] <= room:
                    return True
            found.append(tuple(prefix))
            return len(found) <= limit
        totals = problem.totals[kind]
        for k in range(problem.counts[kind], -1, -1):
            if load + totals[k] <= budget and not extend([*prefix, k], load + totals[k]):
                return False
        return True

    return found if extend([], 0.0) else None


@dataclass
class _Columns:
    """Patterns known so far; grows."""

    problem: Problem
    patterns: list[Pattern] = field(default_factory=list)
    seen: set[Pattern] = field(default_factory=set)
    unlisted: float = float("inf")  # from this target on there are too many patterns to list

    def add(self, pattern: Pattern) -> bool:
        if pattern in self.seen or not any(pattern):
            return False
        self.seen.add(pattern)
        self.patterns.append(pattern)
        return True

    def within(self, target: float) -> list[Pattern]:
        return [p for p in self.patterns if self.problem.load(p) <= target * (1 + 16 / _CELLS)]


def _best_pattern(problem: Problem, prices: Sequence[float], target: float) -> tuple[float, Pattern]:
    """Most valuable pattern within ``target``, costs rounded down to cells: never less than the true maximum."""
    cells = [np.floor(np.asarray(t) / target * _CELLS * (1 - _MARGIN)).astype(np.int64) for t in problem.totals]
    best = np.zeros(_CELLS + 1)
    choices = []
    for kind, cell in enumerate(cells):
        values, chosen = best.copy(), np.zeros(_CELLS + 1, dtype=np.int32)
        if prices[kind] > 0:
            for k in range(1, len(cell)):
                c = int(cell[k])
                if c > _CELLS:
                    break
                value = best[: _CELLS + 1 - c] + k * prices[kind]
                better = value > values[c:] + 1e-13
                values[c:][better] = value[better]
                chosen[c:][better] = k
        best = values
        choices.append(chosen)
    at, pattern = int(np.argmax(best)), [0] * len(cells)
    top = float(best[at])
    for kind in range(len(cells) - 1, -1, -1):
        pattern[kind] = int(choices[kind][at])
        at -= int(cells[kind][pattern[kind]])
    return top, tuple(pattern)


def _relaxation(problem: Problem, columns: _Columns, target: float, rounds: int = 150) -> bool | None:
    """Whether the fractional problem fits into the ranks: False is a proof that ``target`` cannot be met."""
    optimize, _ = _scipy()
    counts = np.asarray(problem.counts, dtype=float)
    for kind, totals in enumerate(problem.totals):
        fit = max(k for k in range(len(totals)) if k <= 1 or totals[k] <= target)
        columns.add(tuple(fit if k == kind else 0 for k in range(len(counts))))
    for _ in range(rounds):
        known = columns.within(target)
        matrix = -np.asarray(known, dtype=float).T
        solved = optimize.linprog(np.ones(len(known)), A_ub=matrix, b_ub=-counts, method="highs")
        if solved.status != 0:
            return None
        if solved.fun <= problem.world + 1e-7:
            return True
        prices = np.maximum(0.0, -solved.ineqlin.marginals)
        top, pattern = _best_pattern(problem, prices.tolist(), target)
        # Prices divided by the best pattern's value are feasible for the dual of the full problem: a bound on it.
        if float(prices @ counts) / max(1.0, top) > problem.world + 1e-6:
            return False
        if top <= 1 + 1e-9 or not columns.add(pattern):
            return None
    return None


def _combine(
    problem: Problem, patterns: Sequence[Pattern], *, nodes: int, seconds: float | None
) -> tuple[list[Pattern] | None, bool]:
    """Ranks' patterns that together hold every matrix at the least total cost; and whether the answer is final."""
    optimize, csr_array = _scipy()
    if not patterns:
        return None, True
    rows = np.vstack([np.asarray(patterns, dtype=float).T, np.ones(len(patterns))])
    low = np.append(np.asarray(problem.counts, dtype=float), 0.0)
    high = np.append(np.full(len(problem.counts), np.inf), float(problem.world))
    loads = np.asarray([problem.load(p) for p in patterns])
    options: dict[str, Any] = {"node_limit": nodes, "mip_rel_gap": 0.02}
    if seconds is not None:
        options["time_limit"] = max(0.05, seconds)
    solved = optimize.milp(
        loads / max(float(loads.max()), 1e-300),
        constraints=optimize.LinearConstraint(csr_array(rows), low, high),
        integrality=np.ones(len(patterns)),
        bounds=optimize.Bounds(0, problem.world),
        options=options,
    )
    if solved.x is None:
        return None, solved.status == 2  # 2: proven infeasible
    uses = np.rint(solved.x).astype(int)
    chosen = [p for p, n in zip(patterns, uses, strict=True) for _ in range(n)]
    return _trimmed(problem, chosen), True


def _trimmed(problem: Problem, patterns: list[Pattern]) -> list[Pattern]:
    """Drop what is held twice, from the fullest ranks first; fill up with empty ranks."""
    held = patterns + [(0,) * len(problem.counts)] * (problem.world - len(patterns))
    for kind, count in enumerate(problem.counts):
        surplus = sum(p[kind] for p in held) - count
        while surplus > 0:
            full = max((r for r in range(len(held)) if held[r][kind]), key=lambda r: (problem.load(held[r]), -r))
            held[full] = tuple(n - (k == kind) for k, n in enumerate(held[full]))
            surplus -= 1
    return held


def solve(
    problem: Problem,
    *,
    start: Sequence[Pattern],
    gap: float = 1e-3,
    time_limit_s: float | None = None,
    rounds: int = 24,
    nodes: int = 400,
) -> tuple[tuple[Pattern, ...], float]:
    """Assign matrices to ranks, the fullest rank as empty as it can be.

    Args:
        problem: what is to be balanced.
        start: a solution to begin with; the result is never worse.
        gap: stop when the load of the fullest rank is this close to the bound, relatively; 0 for optimal if the
            problem is small enough to list its patterns.
        time_limit_s: wall-clock limit, checked between steps; None: limited by counts, so that it repeats exactly.
        rounds: targets tried.
        nodes: branch-and-bound nodes of one integer program.

    Returns:
        The patterns and a proven lower bound on the load of the fullest rank.

    Raises:
        ModuleNotFoundError: SciPy is missing.
    """
    _scipy()
    best, reached, bound = tuple(start), problem.makespan(start), lower_bound(problem)
    low, columns = bound, _Columns(problem)
    for pattern in best:
        columns.add(pattern)
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    for step in range(rounds):
        if reached <= bound * (1 + gap) + 1e-300 or low >= reached * (1 - 100 * _MARGIN):
            break
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            break
        # The bound itself first: where it can be met, nothing else needs to be tried. At last, just below what we have.
        target = low * (1 + 0.5 * gap) if step == 0 else (low + reached) / 2
        if reached - low <= max(gap, 1e-6) * low:
            target = reached * (1 - 10 * _MARGIN)
        found, impossible = _attempt(problem, columns, target, nodes, left)
        if impossible:
            bound = max(bound, target)
        if found is not None:
            found = list(improve(problem, found))
            if problem.makespan(found) < reached * (1 - _MARGIN):
                best, reached = tuple(found), problem.makespan(found)
                for pattern in best:
                    columns.add(pattern)
                continue
        low = max(low, target)
    return best, min(bound, reached)


def _attempt(
    problem: Problem, columns: _Columns, target: float, nodes: int, seconds: float | None
) -> tuple[list[Pattern] | None, bool]:
    """A solution near ``target`` if one is found, and whether it is proven that none meets it."""
    every = all_patterns(problem, target) if target < columns.unlisted else None
    if every is None:
        columns.unlisted = min(columns.unlisted, target)
    else:
        found, final = _combine(problem, every, nodes=50 * nodes, seconds=seconds)
        return found, found is None and final
    fits = _relaxation(problem, columns, target)
    if fits is False:
        return None, True
    found, _ = _combine(problem, columns.within(target), nodes=nodes, seconds=seconds)
    return found, False
