"""Wrong: positions in the order of memory, which for a transposed tensor is not row by row."""

import torch


def changed(old, new):
    a, b = (t.as_strided((t.numel(),), (1,)).view(torch.int16) for t in (old, new))
    return (a != b).nonzero().reshape(-1)


def apply(base, positions, values):
    made = base.clone(memory_format=torch.contiguous_format)
    made.view(-1)[positions] = values
    return made
