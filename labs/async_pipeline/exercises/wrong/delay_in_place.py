"""Wrong: one tensor, changed in place, that all versions share."""


def delayed_training(weights, gradient, update, batches):
    now = weights.clone()
    versions = [now]
    for batch in range(batches):
        now -= update(gradient(versions[max(batch - 1, 0)], batch), now)
        versions.append(now)
    return versions
