"""Wrong: the first batch makes no update, because its gradient 'has not arrived'."""


def delayed_training(weights, gradient, update, batches):
    versions, waiting = [weights.clone()], None
    for batch in range(batches):
        arrived, waiting = waiting, gradient(versions[-1], batch)
        versions.append(versions[-1] if arrived is None else versions[-1] - update(arrived, versions[-1]))
    return versions
