"""Exercise: one Muon update of a matrix whose rows lie on several ranks.

Fill in the function, then run ``python -m labs check muon shards``.
"""

from collections.abc import Callable

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def sharded_update(shards: list[Tensor], orthogonalise: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The update of each rank's rows: the whole momentum orthogonalised, times ``0.2 sqrt(max(rows, cols))``.

    Args:
        shards: each rank's rows of one momentum matrix, (r_i, n), in order; r_i may differ and may be 0.
        orthogonalise: takes one matrix (m, n) to its polar factor. It is dear: call it once.

    Returns:
        One tensor for each rank, of the shape of its shard.
    """
    raise NotSolvedYet("is a row that was normalised alone a row of an orthogonal matrix?")
