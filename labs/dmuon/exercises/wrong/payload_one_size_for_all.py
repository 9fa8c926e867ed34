"""Wrong: weights are taken to be as wide as gradients."""


def step_payload(shapes, ranks, mode, *, weight, gradient, micro_batches):
    whole = sum(rows * cols for rows, cols in shapes) * gradient
    part = sum(-(-rows // ranks) * cols for rows, cols in shapes) * gradient
    if mode == "gather-free":
        return 2 * micro_batches * part + ranks * part + part
    return whole * {"replicated": 1, "ddp": 2, "fsdp-keep": 1 + micro_batches, "fsdp-free": 1 + 2 * micro_batches}[mode]
