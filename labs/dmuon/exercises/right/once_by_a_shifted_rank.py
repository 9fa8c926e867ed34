"""Right, written differently: the last rank that owns something trades with rank 0; counts are looked up one by one."""


def break_it(owners, ranks):
    victim = max(owners.values())
    mine = [name for name, owner in owners.items() if owner == victim]
    theirs = [name for name, owner in owners.items() if owner == 0]
    maps = []
    for rank in range(ranks):
        seen = dict(owners)
        if rank == victim:
            seen[mine[0]] = 0
            seen[theirs[0]] = victim
        maps.append(seen)
    return maps


def not_once(histograms, names, steps):
    everything = set(names).union(*histograms)
    counts = {name: sum(h.get(name, 0) for h in histograms) for name in everything}
    return {n: c for n, c in counts.items() if c != steps * (n in names)}
