"""Reference solution."""

from collections.abc import Callable

import torch
from torch import Tensor


def sharded_update(shards: list[Tensor], orthogonalise: Callable[[Tensor], Tensor]) -> list[Tensor]:
    whole = torch.cat(shards)
    update = orthogonalise(whole) * 0.2 * max(whole.shape) ** 0.5
    return list(update.split([len(s) for s in shards]))
