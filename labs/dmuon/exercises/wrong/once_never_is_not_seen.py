"""Wrong: looks only at names that somebody updated, so a matrix that nobody updated is not missed."""

from collections import Counter


def break_it(owners, ranks):
    maps = [dict(owners) for _ in range(ranks)]
    lost = next(name for name, owner in owners.items() if owner == 0)
    doubled = next(name for name, owner in owners.items() if owner != 0)
    maps[0][lost], maps[0][doubled] = 1, 0
    return maps


def not_once(histograms, names, steps):
    total = Counter()
    for histogram in histograms:
        total.update(histogram)
    return {name: count for name, count in total.items() if count != (steps if name in names else 0)}
