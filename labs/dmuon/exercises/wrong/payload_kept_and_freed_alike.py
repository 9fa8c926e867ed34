"""Wrong: freed weights are not fetched again for the backward."""


def step_payload(shapes, ranks, mode, *, weight, gradient, micro_batches):
    whole = sum(rows * cols for rows, cols in shapes)
    if mode == "replicated":
        return whole * gradient
    if mode == "gather-free":
        part = sum(-(-rows // ranks) * cols for rows, cols in shapes)
        return micro_batches * part * weight + ranks * part * gradient + part * gradient
    return whole * gradient + {"ddp": 1, "fsdp-keep": micro_batches, "fsdp-free": micro_batches}[mode] * whole * weight
