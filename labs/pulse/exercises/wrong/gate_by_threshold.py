"""Wrong: a threshold on the size of the update stands in for the cast."""

import torch
from torch import Tensor


def visible(theta: Tensor, update: Tensor) -> Tensor:
    return update.abs() > theta.abs() / 256


def exchange(theta: Tensor, local: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    update = (theta - local) + error
    mask, nothing = visible(theta, update), torch.zeros_like(update)
    return torch.where(mask, update, nothing), torch.where(mask, nothing, update)
