"""Wrong: without Nesterov it hands out the buffer itself, and the caller normalises it."""


def momentum_step(buffer, grad, mu, nesterov):
    buffer.mul_(mu).add_(grad)
    return grad + mu * buffer if nesterov else buffer
