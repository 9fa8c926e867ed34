"""Reference solution."""

import torch
from torch import Tensor


def combine(gradients: list[Tensor], rows: list[int]) -> Tensor:
    total = torch.zeros_like(gradients[0])
    for gradient, n in zip(gradients, rows, strict=True):
        if n:
            total += gradient * (n / sum(rows))
    return total
