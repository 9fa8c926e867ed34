"""Wrong: a coordinate that was sent is kept as well, and is sent again and again."""

import torch
from torch import Tensor


def visible(theta: Tensor, update: Tensor) -> Tensor:
    before, after = (t.to(torch.bfloat16).view(torch.int16) for t in (theta, theta - update))
    return before != after


def exchange(theta: Tensor, local: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    update = (theta - local) + error
    mask, nothing = visible(theta, update), torch.zeros_like(update)
    return torch.where(mask, update, nothing), update
