"""Exercise: give each pipeline stage its bits.

Fill in both functions, then run ``python -m labs check agoq stages``.
"""

from collections.abc import Sequence
from fractions import Fraction

from dist_lib.checks import NotSolvedYet


def in_flight(stages: int, micro_batches: int) -> list[int]:
    """How many micro-batches' activations each stage holds at most under 1F1B, the first stage first.

    A stage runs forward passes until the backward pass of its first micro-batch can begin, and from then on one
    backward pass for each forward pass. The last stage can go back at once; the one before it has to wait for it, and
    so on.

    Args:
        stages: 1 or more.
        micro_batches: in a batch, 1 or more; perhaps fewer than there are stages.

    Returns:
        One number a stage.
    """
    raise NotSolvedYet("which stage waits longest for its first backward pass?")


def bits(counts: Sequence[int], fixed: Fraction, coded: Fraction, widths: Sequence[int]) -> list[int]:
    """The most bits for each stage with which nobody holds more than the first stage does with the fewest.

    A stage that holds n micro-batches with b bits needs ``n * (fixed + coded * b / 16)``: ``fixed`` is what is never
    encoded (attention's own tensors), ``coded`` what is, at 16 bits.

    Args:
        counts: micro-batches in flight, the first stage first; the first holds most.
        fixed, coded: sizes of one micro-batch's activations, exact.
        widths: bits that can be stored, ascending, at most 16; the first is what the first stage uses.

    Returns:
        One of ``widths`` for each stage.
    """
    raise NotSolvedYet("what is the budget, and does what is not encoded shrink with the count, too?")
