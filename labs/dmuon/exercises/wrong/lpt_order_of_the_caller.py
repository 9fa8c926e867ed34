"""Wrong: equal costs stay in the caller's order, so two ranks may come to different plans."""


def assign(costs, ranks):
    loads, owners = [0.0] * ranks, {}
    for name in sorted(costs, key=lambda n: -costs[n]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners
