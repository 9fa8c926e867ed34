"""Wrong: reads the newest weights, so there is no delay."""


def delayed_training(weights, gradient, update, batches):
    versions = [weights.clone()]
    for batch in range(batches):
        versions.append(versions[-1] - update(gradient(versions[-1], batch), versions[-1]))
    return versions
