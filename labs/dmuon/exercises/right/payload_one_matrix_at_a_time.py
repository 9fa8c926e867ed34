"""Right, written differently: matrix by matrix, message by message."""


def step_payload(shapes, ranks, mode, *, weight, gradient, micro_batches):
    total = 0
    for rows, cols in shapes:
        padded = rows + (-rows) % ranks
        if mode == "gather-free":
            put_in = padded * cols
            for _ in range(micro_batches):
                total += put_in // ranks * weight  # forward
                total += put_in // ranks * weight  # backward
            total += put_in * gradient + put_in // ranks * gradient
            continue
        total += rows * cols * gradient
        passes = {"replicated": 0, "ddp": 1, "fsdp-keep": micro_batches, "fsdp-free": micro_batches * 2}
        total += passes[mode] * rows * cols * weight
    return total
