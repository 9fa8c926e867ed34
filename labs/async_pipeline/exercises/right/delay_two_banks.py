"""Right, written differently: two versions alive, as on a device."""


def delayed_training(weights, gradient, update, batches):
    old = new = weights.clone()
    seen = [new]
    for batch in range(batches):
        step = update(gradient(old, batch), new)
        old, new = new, new - step
        seen.append(new)
    return seen
