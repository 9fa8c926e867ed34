"""Wrong: compares a sum, which does not see elements that changed places."""

from collections import Counter

import torch


def find_diverged(weights):
    found = {}
    for name in weights[0]:
        sums = [int(w[name].contiguous().view(torch.uint8).long().sum()) for w in weights]
        winner, _ = Counter(sums).most_common(1)[0]
        others = [rank for rank, s in enumerate(sums) if s != winner]
        if others:
            found[name] = others
    return found
