"""Wrong: all ranks swap alike, which is only another owner map; nothing is broken."""

from collections import Counter


def break_it(owners, ranks):
    changed = dict(owners)
    lost = next(name for name, owner in owners.items() if owner == 0)
    doubled = next(name for name, owner in owners.items() if owner != 0)
    changed[lost], changed[doubled] = owners[doubled], 0
    return [dict(changed) for _ in range(ranks)]


def not_once(histograms, names, steps):
    total = Counter(dict.fromkeys(names, 0))
    for histogram in histograms:
        total.update(histogram)
    return {name: count for name, count in total.items() if count != (steps if name in names else 0)}
