"""What can go wrong between a publisher and its subscribers, one class for each thing that a caller does next.

A *stale* base is met by fetching other versions, a *corrupt* object by fetching the same one again or an anchor, a
*missing* one by waiting. None of them ever leaves half of a version behind.
"""

from __future__ import annotations


class PulseError(RuntimeError):
    """Base of every error of :mod:`dist_lib.pulse`."""


class StaleBaseError(PulseError):
    """A patch for another base than the one at hand: nothing is damaged, other versions are needed."""


class CorruptPatchError(PulseError):
    """Bytes that are not a patch as the format defines it, or whose result has another digest than announced."""


class LimitError(CorruptPatchError):
    """A patch that asks for more memory than the receiver grants; see :class:`~dist_lib.pulse.format.Limits`."""


class StateError(PulseError):
    """A state that cannot be diffed or patched: not a mapping of names to dense tensors, or changed meanwhile."""


class MissingPackageError(PulseError):
    """An optional package that this part needs is not installed."""

    def __init__(self, package: str, what: str, extra: str = "pulse") -> None:
        super().__init__(f"{what} needs the package {package}; install it with: pip install 'dist-lib[{extra}]'")
