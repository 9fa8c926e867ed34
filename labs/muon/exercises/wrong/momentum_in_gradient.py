"""Wrong: builds the direction inside the gradient."""


def momentum_step(buffer, grad, mu, nesterov):
    buffer.mul_(mu).add_(grad)
    return grad.add_(buffer, alpha=mu) if nesterov else buffer.clone()
