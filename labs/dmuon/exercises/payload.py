"""Exercise: the bytes of one step, as a whole number.

Fill in the function, then run ``python -m labs check dmuon payload``.
"""

from collections.abc import Sequence

from dist_lib.checks import NotSolvedYet


def step_payload(
    shapes: Sequence[tuple[int, int]], ranks: int, mode: str, *, weight: int, gradient: int, micro_batches: int
) -> int:
    """Bytes that one rank hands to collectives in one step, for the matrices.

    A broadcast or a reduce counts its whole tensor on every rank, an all-reduce its tensor once, a reduce-scatter the
    whole tensor that is put in, an all-gather the part that is put in. A matrix that is sharded over R ranks is cut
    along its rows, and every part is padded to ``ceil(rows / R)`` rows.

    Gradients travel once a step, after the last micro-batch. Weights travel before they are used:

    ============== ===================================================================================================
    mode           what travels
    ============== ===================================================================================================
    ``replicated`` gradients are all-reduced; weights do not travel
    ``ddp``        gradients are reduced to the owner; after the step the owner broadcasts the weights, once
    ``fsdp-keep``  the same, but weights are broadcast once for every micro-batch, before its forward
    ``fsdp-free``  weights are freed after the forward, so they are broadcast for every forward and every backward
    ``gather-free`` parts of the weights are all-gathered for every forward and every backward; gradients are
                   reduce-scattered; then the parts of the gradients are all-gathered, for Muon on every rank
    ============== ===================================================================================================

    Args:
        shapes: (rows, cols) of each matrix.
        ranks: at least 1.
        mode: one of the above.
        weight: bytes of one weight as it travels.
        gradient: bytes of one gradient.
        micro_batches: forward-backward passes in a step.
    """
    raise NotSolvedYet("which two sums over the shapes does everything follow from?")
