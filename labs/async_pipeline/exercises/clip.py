"""Exercise: clip by the norm of all stages.

Fill in the function, then run ``python -m labs check async_pipeline clip``.
"""

from collections.abc import Sequence

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def clip_stages(gradients: Sequence[Sequence[Tensor]], max_norm: float) -> float:
    """Scale the gradients of all stages, in place, so that their common norm is at most ``max_norm``.

    One factor for all: ``min(1, max_norm / norm)``, with the Euclidean norm over every element of every stage. A zero
    gradient stays zero. If any element is NaN or infinite, nothing is changed.

    Args:
        gradients: for each stage, its gradients; a stage may have none.
        max_norm: above 0.

    Returns:
        The norm before clipping; NaN or infinity if it is not finite.
    """
    raise NotSolvedYet("what must a stage tell the others, and how many numbers is that?")
