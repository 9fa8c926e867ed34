"""Reference solution."""

import torch
from torch import Tensor


def normalise(x: Tensor) -> Tensor:
    x = x.float()
    largest = x.abs().max()
    if largest == 0:
        return torch.zeros_like(x)
    x = x / largest
    return x / x.norm()
