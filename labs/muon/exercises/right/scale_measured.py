"""Right, written differently: measures the size instead of deriving it."""

import torch


def fused_update(momentum, sizes, orthogonalise, target_rms):
    out = torch.empty_like(momentum)
    begin = 0
    for rows in sizes:
        block = orthogonalise(momentum[begin : begin + rows])
        out[begin : begin + rows] = block * (target_rms / block.square().mean().sqrt())
        begin += rows
    return out
