"""Wrong: the base is written to, so a patch that fails its check has already changed what serves."""

import torch


def changed(old, new):
    a, b = (t.contiguous().reshape(-1).view(torch.int16) for t in (old, new))
    return (a != b).nonzero().reshape(-1)


def apply(base, positions, values):
    made = base.contiguous()
    made.view(-1)[positions] = values
    return made
