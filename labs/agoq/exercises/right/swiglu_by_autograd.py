from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def backward(
    grad: Tensor, gate_codes: Any, up_codes: Any, weight: Tensor, decode: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (decode(gate_codes), decode(up_codes), weight)]
        y = F.linear(F.silu(leaves[0]) * leaves[1], leaves[2])
        gate, up, weights = torch.autograd.grad(y, leaves, grad)
    return gate, up, weights
