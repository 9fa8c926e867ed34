"""Wrong: Nesterov with the buffer of the step before."""


def momentum_step(buffer, grad, mu, nesterov):
    direction = grad + mu * buffer
    buffer.mul_(mu).add_(grad)
    return direction if nesterov else buffer.clone()
