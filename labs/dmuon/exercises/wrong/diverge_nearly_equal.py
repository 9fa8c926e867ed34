"""Wrong: nearly equal is called equal; a rank one rounding away is on another path."""

import torch


def find_diverged(weights):
    found = {}
    for name in weights[0]:
        groups = []
        for rank, tensors in enumerate(weights):
            for group in groups:
                if torch.allclose(tensors[name], weights[group[0]][name], equal_nan=True):
                    group.append(rank)
                    break
            else:
                groups.append([rank])
        largest = max(groups, key=len)
        if len(groups) > 1:
            found[name] = [rank for rank in range(len(weights)) if rank not in largest]
    return found
