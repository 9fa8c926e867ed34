"""Wrong: the dearest matrix comes last, on top of a full rank."""


def assign(costs, ranks):
    loads, owners = [0.0] * ranks, {}
    for name in sorted(costs, key=lambda n: (costs[n], n)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners
