"""Exercise: Newton-Schulz on the Gram matrix, with restarts.

Fill in the function, then run ``python -m labs check muon gram``. Do not call dist_lib's own function.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def gram_newton_schulz(x: Tensor, triples: list[tuple[float, float, float]], restarts: set[int]) -> Tensor:
    """Apply ``X <- (a I + b G + c G G) X`` with ``G = X X^T`` for each triple, touching the wide X rarely.

    Iterate on G (m x m) and collect the product Q of the polynomials. Before each step named in ``restarts`` fold Q
    into X and compute G anew; after the last step apply Q once more.

    Args:
        x: (m, n) with m <= n, Frobenius norm at most 1; must not be changed. All products in its dtype.
        triples: (a, b, c) of each step.
        restarts: steps, counted from 0, before which to fold; a 0 in it changes nothing.
    """
    raise NotSolvedYet("if X becomes P X, what becomes of G = X X^T?")
