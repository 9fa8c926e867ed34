"""Wrong: a matrix whose rows the ranks do not divide is cut without padding."""


def step_payload(shapes, ranks, mode, *, weight, gradient, micro_batches):
    whole = sum(rows * cols for rows, cols in shapes)
    if mode == "replicated":
        return whole * gradient
    if mode == "gather-free":
        return 2 * micro_batches * whole // ranks * weight + whole * gradient + whole // ranks * gradient
    spreads = {"ddp": 1, "fsdp-keep": micro_batches, "fsdp-free": 2 * micro_batches}[mode]
    return whole * gradient + spreads * whole * weight
