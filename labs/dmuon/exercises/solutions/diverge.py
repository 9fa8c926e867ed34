"""Reference solution."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def find_diverged(weights: Sequence[Mapping[str, Tensor]]) -> dict[str, list[int]]:
    found = {}
    for name in weights[0]:
        bits = [w[name].detach().contiguous().view(torch.uint8) for w in weights]
        groups: list[list[int]] = []
        for rank, mine in enumerate(bits):
            for group in groups:
                if torch.equal(mine, bits[group[0]]):
                    group.append(rank)
                    break
            else:
                groups.append([rank])
        largest = max(groups, key=len)  # the first of equally large ones, which has the lowest rank
        if len(groups) > 1:
            found[name] = [rank for rank in range(len(weights)) if rank not in largest]
    return found
