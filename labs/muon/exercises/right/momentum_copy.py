"""Right, written differently."""


def momentum_step(buffer, grad, mu, nesterov):
    fresh = mu * buffer + grad
    buffer.copy_(fresh)
    return grad + mu * fresh if nesterov else fresh
