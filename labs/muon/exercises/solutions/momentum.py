"""Reference solution."""

from torch import Tensor


def momentum_step(buffer: Tensor, grad: Tensor, mu: float, nesterov: bool) -> Tensor:
    buffer.mul_(mu).add_(grad)
    return grad.add(buffer, alpha=mu) if nesterov else buffer.clone()
