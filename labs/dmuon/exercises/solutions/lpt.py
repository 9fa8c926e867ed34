"""Reference solution."""

from collections.abc import Mapping


def assign(costs: Mapping[str, float], ranks: int) -> dict[str, int]:
    loads = [0.0] * ranks
    owners = {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += costs[name]
    return owners
