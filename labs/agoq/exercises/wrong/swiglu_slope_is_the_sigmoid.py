from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def backward(
    grad: Tensor, gate_codes: Any, up_codes: Any, weight: Tensor, decode: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = decode(gate_codes), decode(up_codes)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    inner = grad @ weight
    slope = sigmoid
    return inner * up * slope, inner * silu, grad.T @ (silu * up)
