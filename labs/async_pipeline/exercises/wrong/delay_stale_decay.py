"""Wrong: the update is built at the stale weights, so weight decay acts on the wrong ones."""


def delayed_training(weights, gradient, update, batches):
    versions = [weights.clone()]
    for batch in range(batches):
        stale = versions[max(batch - 1, 0)]
        versions.append(versions[-1] - update(gradient(stale, batch), stale))
    return versions
