"""Exercise: bring a matrix to Frobenius norm 1, whatever its scale.

Fill in the function, then run ``python -m labs check muon normalise``. Do not call dist_lib's own function.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def normalise(x: Tensor) -> Tensor:
    """The matrix divided by its Frobenius norm, in float32; zero stays zero.

    Args:
        x: (m, n), float32 or a half type, entries anywhere from 1e-30 to 1e30 in size; must not be changed.
    """
    raise NotSolvedYet("what is the square of 1e-30 in float32, and of 1e30?")
