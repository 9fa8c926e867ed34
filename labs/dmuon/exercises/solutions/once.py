"""Reference solution."""

from collections import Counter
from collections.abc import Mapping, Sequence


def break_it(owners: Mapping[str, int], ranks: int) -> list[dict[str, int]]:
    maps = [dict(owners) for _ in range(ranks)]
    lost = next(name for name, owner in owners.items() if owner == 0)
    doubled = next(name for name, owner in owners.items() if owner != 0)
    maps[0][lost], maps[0][doubled] = 1, 0  # rank 0 swaps one of its own for another's
    return maps


def not_once(histograms: Sequence[Mapping[str, int]], names: Sequence[str], steps: int) -> dict[str, int]:
    total = Counter(dict.fromkeys(names, 0))
    for histogram in histograms:
        total.update(histogram)
    known = set(names)
    return {name: count for name, count in total.items() if count != (steps if name in known else 0)}
