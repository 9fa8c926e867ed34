"""Wrong: compares values, so it misses the sign of a zero and takes a NaN for a difference."""

import torch


def find_diverged(weights):
    found = {}
    for name in weights[0]:
        groups = []
        for rank, tensors in enumerate(weights):
            for group in groups:
                if torch.equal(tensors[name], weights[group[0]][name]):
                    group.append(rank)
                    break
            else:
                groups.append([rank])
        largest = max(groups, key=len)
        if len(groups) > 1:
            found[name] = [rank for rank in range(len(weights)) if rank not in largest]
    return found
