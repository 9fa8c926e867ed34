"""Wrong: gradients travel after every micro-batch."""


def step_payload(shapes, ranks, mode, *, weight, gradient, micro_batches):
    whole = sum(rows * cols for rows, cols in shapes)
    if mode == "replicated":
        return micro_batches * whole * gradient
    if mode == "gather-free":
        part = sum(-(-rows // ranks) * cols for rows, cols in shapes)
        return micro_batches * (2 * part * weight + ranks * part * gradient) + part * gradient
    spreads = {"ddp": 1, "fsdp-keep": micro_batches, "fsdp-free": 2 * micro_batches}[mode]
    return micro_batches * whole * gradient + spreads * whole * weight
