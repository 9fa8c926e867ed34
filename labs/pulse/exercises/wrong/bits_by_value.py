"""Wrong: values are compared, so -0.0 stays behind and every NaN travels for ever."""

import torch


def changed(old, new):
    return (old.reshape(-1) != new.reshape(-1)).nonzero().reshape(-1)


def apply(base, positions, values):
    made = base.clone(memory_format=torch.contiguous_format)
    made.view(-1)[positions] = values
    return made
