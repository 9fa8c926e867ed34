"""Exercise: error feedback.

Fill in the class, then run ``python -m labs check async_pipeline feedback``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


class Feedback:
    """Turns the updates of an optimizer into displacements that repay what the delay left out.

    With update number n called u_n: the first displacement is u_1 itself; afterwards it is u_n + (u_n - u_(n-1)).
    """

    def displacement(self, update: Tensor) -> Tensor:
        """What to subtract from the weights.

        Args:
            update: the optimizer's update, learning rate and weight decay included. The caller may reuse its memory
                for the next update.

        Returns:
            A tensor of the same shape and dtype that the caller may change.
        """
        raise NotSolvedYet("which of the two, update or displacement, must be remembered?")
