"""Exercise: send what the forward pass can see, and lose nothing of the rest.

Fill in both functions, then run ``python -m labs check pulse gate``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def visible(theta: Tensor, update: Tensor) -> Tensor:
    """Where subtracting an update changes the weight that the forward pass uses.

    The forward pass uses the bfloat16 cast of the weights. A coordinate is visible if the casts of ``theta`` and of
    ``theta - update`` have other bits. Thresholds on the size of the update are only nearly right: what counts is
    where in its rounding cell the weight lies.

    Args:
        theta: float32, the weights that all workers share.
        update: float32, same shape.

    Returns:
        bool, same shape.
    """
    raise NotSolvedYet("compare what, after which cast?")


def exchange(theta: Tensor, local: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """One worker's part of a round: what it sends, and what it keeps for later.

    The worker's update is ``(theta - local) + error``: its own training, and all that was not sent in earlier rounds.
    Visible coordinates are sent whole; the others wait. For each coordinate, sent + kept is exactly the update.

    Args:
        theta: float32, the weights with which the round began.
        local: float32, this worker's weights after its own training.
        error: float32, what it kept in the round before.

    Returns:
        ``(sent, kept)``, float32 of the same shape; 0 where there is nothing. The arguments are not written to.
    """
    raise NotSolvedYet("which of the two tensors gets the coordinate?")
