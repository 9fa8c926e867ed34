"""Exercise: see where 8-bit sums wrap around, and add gradients to codes without it.

Fill in both functions, then run ``python -m labs check agoq wrap``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def wrapped(codes: Tensor) -> Tensor:
    """Where adding codes in int8 gives another number than their sum.

    An all-reduce that adds int8 tensors keeps the lowest 8 bits of each sum and reports nothing. (That the codes of
    two ranks also have different scales is another fault.)

    Args:
        codes: (terms, n) int8: what each rank sends, or each micro-batch adds.

    Returns:
        (n,) bool: True where the int8 sum over terms differs from the true sum of the codes.
    """
    raise NotSolvedYet("does it matter what happens on the way, if the end is right?")


def accumulate(codes: Tensor, scales: Tensor, gradient: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Add a micro-batch's gradient to what is stored in 8 bits: decode, add in float32, encode anew.

    Number i of the sum is ``codes[i] * scales[i // block] / 127``. A block's new scale is the largest magnitude of the
    new sum in it, its new codes the nearest whole numbers from -127 to 127. A block whose sum is all zeros has scale 0
    and codes 0. A NaN must still be a NaN when the block is decoded.

    Args:
        codes: (n,) int8; must not be changed.
        scales: (n / block,) float32; must not be changed. All zeros in the beginning.
        gradient: (n,) float32.
        block: divides n.

    Returns:
        New codes (n,) int8 and scales (n / block,) float32.
    """
    raise NotSolvedYet("what must the scale follow: the first gradient, the largest so far, or the sum?")
