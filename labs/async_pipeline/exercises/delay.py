"""Exercise: training with gradients that are one step old.

Fill in the function, then run ``python -m labs check async_pipeline delay``.
"""

from collections.abc import Callable

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def delayed_training(
    weights: Tensor,
    gradient: Callable[[Tensor, int], Tensor],
    update: Callable[[Tensor, Tensor], Tensor],
    batches: int,
) -> list[Tensor]:
    """Do what a pipeline without a flush does to the weights, in a single process.

    Batch ``g`` is evaluated on the weights after ``max(g - 1, 0)`` updates. Its gradient is turned into an update at
    the *newest* weights, and subtracted from them. Every batch makes exactly one update.

    Args:
        weights: at the start, any shape; must not be changed.
        gradient: ``gradient(weights, batch)``, batches counted from 0.
        update: ``update(gradient, newest_weights)``, what to subtract: it holds learning rate, momentum and weight
            decay, so call it once a batch and in order.
        batches: how many.

    Returns:
        The weights after 0, 1, ..., ``batches`` updates.
    """
    raise NotSolvedYet("how many versions of the weights must you keep?")
