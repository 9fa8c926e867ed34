"""Reference solution: m n elements whose squares sum to min(m, n) have a root mean square of 1 / sqrt(max(m, n))."""

from collections.abc import Callable

import torch
from torch import Tensor


def fused_update(
    momentum: Tensor, sizes: list[int], orthogonalise: Callable[[Tensor], Tensor], target_rms: float
) -> Tensor:
    return torch.cat([orthogonalise(b) * target_rms * max(b.shape) ** 0.5 for b in momentum.split(sizes)])
