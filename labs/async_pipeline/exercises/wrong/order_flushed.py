"""Wrong: drains the pipeline after every batch."""


def stage_order(stage, stages, micro_batches, batches):
    order = []
    for batch in range(batches):
        warm_up = min(stages - 1 - stage, micro_batches)
        order += [("F", batch, i) for i in range(warm_up)]
        for i in range(micro_batches - warm_up):
            order += [("F", batch, warm_up + i), ("B", batch, i)]
        order += [("B", batch, i) for i in range(micro_batches - warm_up, micro_batches)]
    return order
