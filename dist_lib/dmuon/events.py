"""A record of what each rank did and when, for timelines and for the overlap they should show.

Times are seconds of a monotonic clock, which processes of one machine share; on a GPU a span lasts from the moment the
device reaches it until the device has done it. It records; it decides nothing: no collective depends on a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

KINDS = ("forward", "backward", "reduce", "orthogonalise", "adamw", "publish", "materialise", "wait")


@dataclass(frozen=True)
class Event:
    """One span of work.

    Attributes:
        rank: who.
        kind: one of :data:`KINDS`. ``"publish"`` and ``"materialise"`` end when the data has arrived; ``"wait"`` is
            the part of that time in which this rank had nothing else to do.
        layer: name of the layer; ``""`` the matrices of no layer, ``"rest"`` the parameters that are no matrices.
        bytes: payload, 0 for computation.
        start, end: seconds of a monotonic clock.
    """

    rank: int
    kind: str
    layer: str
    bytes: int
    start: float
    end: float


@dataclass
class Mark:
    """A point in time on this process's device."""

    host: float
    device: torch.cuda.Event | None

    def seconds(self, origin: Mark) -> float:
        """Seconds of the monotonic clock; waits for the device to reach the mark."""
        if self.device is None or origin.device is None:
            return self.host
        self.device.synchronize()
        return origin.host + 1e-3 * float(origin.device.elapsed_time(self.device))


class EventLog:
    """Collects :class:`Event` spans of one rank.

    Args:
        rank: of this process.
        device: where the work happens.
        enabled: whether anything is kept; switch it at any time.
    """

    def __init__(self, rank: int, device: torch.device, *, enabled: bool = False) -> None:
        self.rank, self.device, self.enabled = rank, device, enabled
        self._spans: list[tuple[str, str, int, Mark, Mark]] = []
        self._origin: Mark | None = None

    def mark(self) -> Mark | None:
        """Now, on the current stream; None while switched off."""
        if not self.enabled:
            return None
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        if self._origin is None and event is not None:
            event.synchronize()  # ties the device's clock to the host's, once
        mark = Mark(time.monotonic(), event)
        self._origin = self._origin or mark
        return mark

    def add(self, kind: str, layer: str, nbytes: int, start: Mark | None) -> None:
        """Close a span that began at ``start`` (from :meth:`mark`); nothing if that was None.

        Raises:
            ValueError: a kind that is none of :data:`KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r}: allowed are {', '.join(KINDS)}")
        end = self.mark() if start is not None else None
        if start is not None and end is not None:
            self._spans.append((kind, layer, nbytes, start, end))

    @contextlib.contextmanager
    def span(self, kind: str, layer: str = "", nbytes: int = 0) -> Iterator[None]:
        """Record the block as one span."""
        start = self.mark()
        yield
        self.add(kind, layer, nbytes, start)

    @property
    def events(self) -> list[Event]:
        """All spans so far, by start."""
        origin = self._origin
        if origin is None:
            return []
        found = [Event(self.rank, k, la, n, a.seconds(origin), b.seconds(origin)) for k, la, n, a, b in self._spans]
        return sorted(found, key=lambda e: (e.start, e.end))

    def clear(self) -> None:
        """Forget all spans."""
        self._spans.clear()

    def gather(self, group: dist.ProcessGroup | None = None) -> list[Event]:
        """The spans of all ranks of ``group``, by start, on every rank; collective."""
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, self.events, group=group)
        return sorted((e for events in found for e in events), key=lambda e: (e.start, e.end, e.rank))


def exposed_seconds(events: Sequence[Event], rank: int | None = None) -> dict[str, float]:
    """Seconds spent waiting, by layer: communication that no computation covered; of one rank or of all together."""
    found: dict[str, float] = {}
    for e in events:
        if e.kind == "wait" and rank in (None, e.rank):
            found[e.layer] = found.get(e.layer, 0.0) + e.end - e.start
    return found
