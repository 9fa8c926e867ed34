"""Exercise: find what changed by its bits, and write it over the old weights.

Fill in both functions, then run ``python -m labs check pulse bits``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def changed(old: Tensor, new: Tensor) -> Tensor:
    """Positions of the cells whose bits differ.

    Bits decide, not values: 0.0 and -0.0 are equal as numbers and differ here; a NaN is unequal to itself as a number
    and is the same here, as long as its bits are.

    Args:
        old, new: bfloat16, of one shape, which may be empty or have no dimension; not always contiguous.

    Returns:
        int64, one-dimensional, ascending: positions in the flattened tensor, row by row.
    """
    raise NotSolvedYet("as which dtype must two bytes be read to compare bits?")


def apply(base: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Put new values into a copy of the base.

    Args:
        base: bfloat16, any shape; must not be written to: it serves requests until the copy has been checked.
        positions: int64, as :func:`changed` gives them; may be empty.
        values: bfloat16, one for each position: what the cell holds from now on, bit for bit.

    Returns:
        A tensor of the shape of ``base``. Applying the same patch to it again must change nothing.
    """
    raise NotSolvedYet("add or overwrite?")
