"""Wrong: one forward too many before the first backward, and for short runs more forwards than there are."""


def stage_order(stage, stages, micro_batches, batches):
    total = micro_batches * batches
    warm_up = stages - stage
    kinds = [("F", i) for i in range(warm_up)]
    for i in range(total - warm_up):
        kinds += [("B", i), ("F", warm_up + i)]
    kinds += [("B", i) for i in range(max(0, total - warm_up), total)]
    return [(kind, *divmod(i, micro_batches)) for kind, i in kinds]
