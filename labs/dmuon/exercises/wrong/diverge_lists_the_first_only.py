"""Wrong: stops at the first rank that differs."""

import torch


def find_diverged(weights):
    found = {}
    for name in weights[0]:
        bits = [w[name].contiguous().view(torch.uint8) for w in weights]
        agree = [sum(torch.equal(a, b) for b in bits) for a in bits]
        majority = bits[agree.index(max(agree))]
        for rank, mine in enumerate(bits):
            if not torch.equal(mine, majority):
                found[name] = [rank]
                break
    return found
