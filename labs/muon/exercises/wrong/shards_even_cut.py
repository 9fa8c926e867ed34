"""Wrong: cuts the result evenly, whatever the ranks hold; and repeats the work on every rank."""

import torch


def sharded_update(shards, orthogonalise):
    whole = torch.cat(shards)
    return [orthogonalise(whole).chunk(len(shards))[i] * 0.2 * max(whole.shape) ** 0.5 for i in range(len(shards))]
