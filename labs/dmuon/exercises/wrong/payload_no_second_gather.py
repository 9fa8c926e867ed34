"""Wrong: forgets that Muon on every rank needs the whole gradients again."""


def step_payload(shapes, ranks, mode, *, weight, gradient, micro_batches):
    whole = sum(rows * cols for rows, cols in shapes)
    if mode == "replicated":
        return whole * gradient
    if mode == "gather-free":
        part = sum(-(-rows // ranks) * cols for rows, cols in shapes)
        return 2 * micro_batches * part * weight + ranks * part * gradient
    spreads = {"ddp": 1, "fsdp-keep": micro_batches, "fsdp-free": 2 * micro_batches}[mode]
    return whole * gradient + spreads * whole * weight
