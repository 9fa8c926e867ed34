"""Wrong: counts matrices where it should add costs."""


def assign(costs, ranks):
    counts, owners = [0] * ranks, {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        owners[name] = counts.index(min(counts))
        counts[owners[name]] += 1
    return owners
