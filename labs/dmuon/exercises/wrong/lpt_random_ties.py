"""Wrong: every process has its own hash of a string, so every rank breaks ties in its own way."""


def assign(costs, ranks):
    loads, owners = [0.0] * ranks, {}
    for name in sorted(costs, key=lambda n: (-costs[n], hash((n, id(owners))))):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners
