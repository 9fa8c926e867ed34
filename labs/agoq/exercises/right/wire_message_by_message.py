from math import ceil


def sent(numel: int, ranks: int, block: int) -> int:
    shard = ceil(numel / ranks)
    total = 0
    for _step in ("all-to-all", "all-gather"):
        for receiver in range(ranks):
            if receiver == 0:  # this rank itself
                continue
            message = sum(4 for _ in range(0, shard, block)) + shard
            while message % 4:
                message += 1
            total += message
    return total
