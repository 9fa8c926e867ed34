"""Wrong: rank 0 is taken to be right."""

import torch


def find_diverged(weights):
    found = {}
    for name in weights[0]:
        bits = [w[name].contiguous().view(torch.uint8) for w in weights]
        others = [rank for rank, mine in enumerate(bits) if not torch.equal(mine, bits[0])]
        if others:
            found[name] = others
    return found
