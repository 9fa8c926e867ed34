"""Right, written differently: a heap of (load, rank)."""

import heapq


def assign(costs, ranks):
    queue = [(0.0, rank) for rank in range(ranks)]
    found = {}
    for cost, name in sorted((-cost, name) for name, cost in costs.items()):
        load, rank = heapq.heappop(queue)
        found[name] = rank
        heapq.heappush(queue, (load - cost, rank))
    return {name: found[name] for name in costs}
