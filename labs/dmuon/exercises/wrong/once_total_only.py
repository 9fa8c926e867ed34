"""Wrong: adds over the names as well, and so is fooled."""


def break_it(owners, ranks):
    maps = [dict(owners) for _ in range(ranks)]
    lost = next(name for name, owner in owners.items() if owner == 0)
    doubled = next(name for name, owner in owners.items() if owner != 0)
    maps[0][lost], maps[0][doubled] = 1, 0
    return maps


def not_once(histograms, names, steps):
    total = sum(sum(h.values()) for h in histograms)
    return {} if total == steps * len(names) else dict.fromkeys(names, total)
