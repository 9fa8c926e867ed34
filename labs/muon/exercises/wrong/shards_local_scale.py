"""Wrong: the right matrix, scaled by the shape of the shard."""

import torch


def sharded_update(shards, orthogonalise):
    parts = orthogonalise(torch.cat(shards)).split([len(s) for s in shards])
    return [p * 0.2 * max(p.shape) ** 0.5 for p in parts]
