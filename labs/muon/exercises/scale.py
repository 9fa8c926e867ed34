"""Exercise: the update of a fused query-key-value projection, with one size for every block.

Fill in the function, then run ``python -m labs check muon scale``.
"""

from collections.abc import Callable

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def fused_update(
    momentum: Tensor, sizes: list[int], orthogonalise: Callable[[Tensor], Tensor], target_rms: float
) -> Tensor:
    """Orthogonalise each block of rows on its own and scale it so that its elements have the same root mean square.

    Args:
        momentum: (sum of sizes, n), of full rank in every block; must not be changed.
        sizes: rows of the blocks, in order.
        orthogonalise: takes one matrix (m, n) to its polar factor: all singular values 1.
        target_rms: root mean square of the elements of each block of the result.
    """
    raise NotSolvedYet("what is the Frobenius norm of an m x n matrix with all singular values 1?")
