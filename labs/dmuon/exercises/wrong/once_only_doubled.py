"""Wrong: one matrix is updated twice, but none is forgotten, so the total gives it away."""

from collections import Counter


def break_it(owners, ranks):
    maps = [dict(owners) for _ in range(ranks)]
    maps[0][next(name for name, owner in owners.items() if owner != 0)] = 0
    return maps


def not_once(histograms, names, steps):
    total = Counter(dict.fromkeys(names, 0))
    for histogram in histograms:
        total.update(histogram)
    return {name: count for name, count in total.items() if count != (steps if name in names else 0)}
