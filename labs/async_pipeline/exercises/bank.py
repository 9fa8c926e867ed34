"""Exercise: two banks of weights under running work.

Fill in the class, then run ``python -m labs check async_pipeline bank``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


class WeightBanks:
    """Holds two versions of one weight tensor: no more memory than that, and no version changes while it is in use.

    Micro-batches between :meth:`acquire` and :meth:`release` use a version. A version is retired when the version
    after the next is published; by then its users must be gone.
    """

    def __init__(self, weights: Tensor) -> None:
        """Start with version 0; ``weights`` stays the caller's."""
        raise NotSolvedYet("two tensors, and a count of users for each")

    def acquire(self, version: int) -> Tensor:
        """The weights of a version, for one micro-batch.

        Raises:
            KeyError: the version does not exist yet, or was retired.
        """
        raise NotSolvedYet("which bank holds this version, if any?")

    def release(self, version: int) -> None:
        """One micro-batch is done with a version."""
        raise NotSolvedYet("one user fewer")

    def publish(self, update: Tensor) -> int:
        """Make the newest weights minus ``update`` the next version, in the bank of the one that it retires.

        Returns:
            The number of the new version.

        Raises:
            RuntimeError: the version to retire still has users; nothing was changed.
        """
        raise NotSolvedYet("whose memory may be overwritten, and when?")
