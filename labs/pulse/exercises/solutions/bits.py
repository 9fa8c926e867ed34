"""Reference solution."""

import torch
from torch import Tensor


def changed(old: Tensor, new: Tensor) -> Tensor:
    a, b = (t.contiguous().reshape(-1).view(torch.int16) for t in (old, new))
    return (a != b).nonzero().reshape(-1)


def apply(base: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    made = base.clone(memory_format=torch.contiguous_format)
    made.view(-1).view(torch.int16)[positions] = values.view(torch.int16)
    return made
