"""Exercise: which rank has left the others?

Fill in the function, then run ``python -m labs check dmuon diverge``.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def find_diverged(weights: Sequence[Mapping[str, Tensor]]) -> dict[str, list[int]]:
    """Compare the weights of all ranks bit by bit and name the ranks that differ from the majority.

    After a step every rank must hold the same bits. Values that compare equal may have other bits (0.0 and -0.0), and
    equal bits may compare unequal (NaN): the bits decide. The odd one out can be any rank, rank 0 as well.

    Args:
        weights: for each rank, its tensors by name: the same names, shapes and data types (float32, float16 or
            bfloat16) on every rank, any memory layout. Not to be changed.

    Returns:
        For each name on which the ranks are not equal: the ranks, ascending, whose bits are not those of the largest
        group of equal ranks. Of groups equally large, the one with the lowest rank counts as the majority.
    """
    raise NotSolvedYet("how do you see a tensor as whole numbers without changing a bit?")
