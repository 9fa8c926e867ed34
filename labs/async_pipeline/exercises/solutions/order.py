"""Reference solution."""


def stage_order(stage: int, stages: int, micro_batches: int, batches: int) -> list[tuple[str, int, int]]:
    total = micro_batches * batches
    warm_up = min(stages - 1 - stage, total)
    kinds = [("F", i) for i in range(warm_up)]
    for i in range(total - warm_up):
        kinds += [("F", warm_up + i), ("B", i)]
    kinds += [("B", i) for i in range(total - warm_up, total)]
    return [(kind, *divmod(i, micro_batches)) for kind, i in kinds]
