"""Wrong: the change of the cast is sent instead of the update, so that sent and kept do not add up."""

import torch
from torch import Tensor


def visible(theta: Tensor, update: Tensor) -> Tensor:
    before, after = (t.to(torch.bfloat16).view(torch.int16) for t in (theta, theta - update))
    return before != after


def exchange(theta: Tensor, local: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    update = (theta - local) + error
    mask, nothing = visible(theta, update), torch.zeros_like(update)
    return torch.where(mask, (theta.bfloat16() - (theta - update).bfloat16()).float(), nothing), torch.where(
        mask, nothing, update
    )
