"""Exercise: publish a version such that a crash between any two writes leaves the old version or the new one.

Fill in both functions, then run ``python -m labs check pulse order``.
"""

from typing import Protocol

from dist_lib.checks import NotSolvedYet


class Store(Protocol):
    """Named objects. Each ``put`` is whole or not there; nothing holds several of them together."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing one of that name."""

    def get(self, name: str) -> bytes | None:
        """Read an object; None if there is none."""

    def names(self) -> list[str]:
        """Names of all objects, sorted."""


def publish(store: Store, version: int, payload: bytes) -> None:
    """Make a payload the newest version.

    The process may die between any two calls of ``put``, and a publisher that comes back publishes the same version
    number again, perhaps with another payload. Objects of older versions must stay readable: a slow receiver may be
    reading them.

    Args:
        store: where to.
        version: the next number, from 0 on.
        payload: any bytes.
    """
    raise NotSolvedYet("which object makes the version visible, and when is it written?")


def follow(store: Store) -> tuple[int, bytes] | None:
    """The newest version that is complete and undamaged, with its payload; None if there is none.

    Any object may have been damaged or lost after it was written. Then an older version is the answer, never damaged
    bytes.
    """
    raise NotSolvedYet("how does a receiver know that the bytes are those that were published?")
