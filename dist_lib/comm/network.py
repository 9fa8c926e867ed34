"""A network in two numbers: a latency and a bandwidth, and the times of collectives on it.

The alpha-beta model: a message of b bytes takes ``latency + b / bandwidth``. Ring algorithms move a share of
``(world - 1) / world`` of the payload through each link in ``world - 1`` messages; rooted ones use a pipelined chain.
Bandwidth is that of one rank's link in one direction, in bytes per second. The model knows no congestion, no topology
and no overlap; :meth:`NetworkModel.wire_bytes` gives the bytes that one rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

_SHARE: dict[
    str, tuple[Callable[[int], Fraction], Callable[[int], int]]
] = {  # payload share that each rank sends, as a function of the world size; messages in a row
    "all_reduce": (lambda w: Fraction(2 * (w - 1), w), lambda w: 2 * (w - 1)),
    "reduce_scatter": (lambda w: Fraction(w - 1, w), lambda w: w - 1),
    "all_gather": (lambda w: Fraction(w - 1), lambda w: w - 1),
    "all_to_all": (lambda w: Fraction(w - 1, w), lambda w: w - 1),
    "broadcast": (lambda w: Fraction(1 if w > 1 else 0), lambda w: w - 1),
    "reduce": (lambda w: Fraction(1 if w > 1 else 0), lambda w: w - 1),
    "send": (lambda w: Fraction(1), lambda w: 1),
}


@dataclass(frozen=True)
class NetworkModel:
    """Times of collectives from a latency and a bandwidth.

    Attributes:
        latency_s: time of an empty message, seconds.
        bandwidth_bytes_per_s: of one rank's link, in one direction.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bandwidth_bytes_per_s > 0:
            raise ValueError(
                f"latency {self.latency_s} s, bandwidth {self.bandwidth_bytes_per_s} B/s: "
                "need a latency of at least 0 and a bandwidth above 0"
            )

    @staticmethod
    def wire_bytes(op: str, payload_bytes: int, world: int) -> Fraction:
        """Bytes that each rank sends for one ``op`` whose input is ``payload_bytes`` (a fraction if not divisible).

        Raises:
            ValueError: an unknown ``op``, negative bytes or a world below 1.
        """
        if op not in _SHARE or payload_bytes < 0 or world < 1:
            raise ValueError(f"op {op!r}, {payload_bytes} bytes, world {world}: allowed ops are {sorted(_SHARE)}")
        return _SHARE[op][0](world) * payload_bytes

    def time(self, op: str, payload_bytes: int, world: int) -> float:
        """Seconds for one ``op``: messages in a row times the latency, plus the wire bytes over the bandwidth."""
        wire = self.wire_bytes(op, payload_bytes, world)
        return _SHARE[op][1](world) * self.latency_s + float(wire) / self.bandwidth_bytes_per_s

    def all_reduce(self, payload_bytes: int, world: int) -> float:
        """Ring all-reduce: ``2 (w-1) latency + 2 (w-1)/w bytes / bandwidth``."""
        return self.time("all_reduce", payload_bytes, world)

    def reduce_scatter(self, payload_bytes: int, world: int) -> float:
        """Ring reduce-scatter of an input of ``payload_bytes``: half an all-reduce."""
        return self.time("reduce_scatter", payload_bytes, world)

    def all_gather(self, payload_bytes: int, world: int) -> float:
        """Ring all-gather; ``payload_bytes`` is one rank's share."""
        return self.time("all_gather", payload_bytes, world)

    def broadcast(self, payload_bytes: int, world: int) -> float:
        """Pipelined chain from one root."""
        return self.time("broadcast", payload_bytes, world)

    def reduce(self, payload_bytes: int, world: int) -> float:
        """Pipelined chain to one root."""
        return self.time("reduce", payload_bytes, world)

    def all_to_all(self, payload_bytes: int, world: int) -> float:
        """Each rank keeps 1/w of its ``payload_bytes`` and sends the rest."""
        return self.time("all_to_all", payload_bytes, world)

    def p2p(self, payload_bytes: int) -> float:
        """One message."""
        return self.time("send", payload_bytes, 2)
