"""Exercise: momentum, without giving the buffer away.

Fill in the function, then run ``python -m labs check muon momentum``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def momentum_step(buffer: Tensor, grad: Tensor, mu: float, nesterov: bool) -> Tensor:
    """Advance heavy-ball momentum and return the direction to orthogonalise.

    The buffer becomes ``mu * buffer + grad``, in place. The direction is ``grad + mu * buffer`` (of the new buffer)
    with ``nesterov``, else the buffer's value. The caller will normalise the direction in place; buffer and gradient
    must survive that.

    Args:
        buffer: momentum of the steps before; changed in place.
        grad: this step's gradient, same shape; must not be changed.
        mu: from 0 to 1.
        nesterov: which direction.
    """
    raise NotSolvedYet("write the buffer's recurrence first")
