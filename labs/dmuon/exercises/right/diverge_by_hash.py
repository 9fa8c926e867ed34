"""Right, written differently: a hash of the bytes, and a vote."""

import hashlib
from collections import Counter

import torch


def find_diverged(weights):
    found = {}
    for name in weights[0]:
        votes = []
        for tensors in weights:
            whole = tensors[name].clone(memory_format=torch.contiguous_format)
            votes.append(hashlib.sha256(bytes(whole.view(torch.uint8).flatten().tolist())).hexdigest())
        winner, _ = Counter(votes).most_common(1)[0]  # equal counts stay in the order of first sight
        others = [rank for rank, vote in enumerate(votes) if vote != winner]
        if others:
            found[name] = others
    return found
