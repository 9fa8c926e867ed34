"""Exercise: fool the count of orthogonalisations, then write the count that cannot be fooled.

Fill in both functions, then run ``python -m labs check dmuon once``.
"""

from collections.abc import Mapping, Sequence

from dist_lib.checks import NotSolvedYet


def break_it(owners: Mapping[str, int], ranks: int) -> list[dict[str, int]]:
    """Make the ranks disagree about owners so that only a total looks right.

    Each rank updates the matrices that *its own* map says it owns. Return one map for each rank, such that

    * at least one matrix is orthogonalised twice or more and at least one never, and yet
    * the number of orthogonalisations, over all ranks, is that of the matrices, as if nothing had happened.

    Args:
        owners: the right map, with at least two matrices on rank 0 and one or more on another; must not be changed.
        ranks: at least 2.

    Returns:
        A map for each rank, all with the names of ``owners`` and owners from 0 to ``ranks - 1``.
    """
    raise NotSolvedYet("what if a rank believes that it owns one matrix instead of another?")


def not_once(histograms: Sequence[Mapping[str, int]], names: Sequence[str], steps: int) -> dict[str, int]:
    """Find every matrix that was not orthogonalised exactly once a step.

    Args:
        histograms: for each rank, how often it orthogonalised which matrix; names with count 0 may be missing, and a
            rank may name a matrix that nobody should have updated.
        names: of all matrices.
        steps: taken so far.

    Returns:
        The names whose count over all ranks is not ``steps``, and that count; a name outside ``names`` should be at 0.
    """
    raise NotSolvedYet("over which axis must you add, and over which must you not?")
