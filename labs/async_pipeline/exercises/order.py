"""Exercise: the order of work of one stage, without a flush.

Fill in the function, then run ``python -m labs check async_pipeline order``.
"""

from dist_lib.checks import NotSolvedYet


def stage_order(stage: int, stages: int, micro_batches: int, batches: int) -> list[tuple[str, int, int]]:
    """One forward, one backward, for several batches in a row and without waiting between them.

    A stage first runs ``stages - 1 - stage`` forwards; then it alternates one forward and one backward until the
    forwards are used up; then it runs the backwards that are left. Micro-batches run in ascending order, and the
    first micro-batch of a batch follows the last one of the batch before as if they belonged together.

    Args:
        stage: from 0 (it sees the tokens) to ``stages - 1`` (it computes the loss).
        stages: in the pipeline, at least 1.
        micro_batches: of each batch, at least 1.
        batches: at least 1.

    Returns:
        Tuples ``(kind, batch, micro_batch)`` with kind ``"F"`` or ``"B"`` and both numbers counted from 0.
    """
    raise NotSolvedYet("number all micro-batches through before you think of batches")
