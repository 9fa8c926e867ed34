"""Wrong: the last stage gets the longest warm-up."""


def stage_order(stage, stages, micro_batches, batches):
    total = micro_batches * batches
    warm_up = min(stage, total)
    kinds = [("F", i) for i in range(warm_up)]
    for i in range(total - warm_up):
        kinds += [("F", warm_up + i), ("B", i)]
    kinds += [("B", i) for i in range(total - warm_up, total)]
    return [(kind, *divmod(i, micro_batches)) for kind, i in kinds]
