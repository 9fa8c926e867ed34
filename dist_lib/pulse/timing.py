"""How long a sync takes and how busy it leaves the trainer: a closed form, and where its numbers come from.

A trainer computes for ``compute_s``, then a sync takes ``sync_seconds``; utilisation is the share of computing. The
paper states that 90 % need 20 Gbit/s for full weights of 14 GB and 0.2 Gbit/s for patches of 140 MB (arXiv:2602.03839,
abstract); both fit one and the same 50.4 s between syncs if only the transfer counts, which is our derivation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAPER_FULL_BYTES = 14e9
PAPER_PATCH_BYTES = 140e6
PAPER_COMPUTE_S = 50.4


@dataclass(frozen=True, kw_only=True)
class SyncCost:
    """Seconds of one sync that do not depend on the link.

    Attributes:
        diff_s, encode_s: at the publisher.
        decode_s, apply_s, verify_s, reload_s: at the receiver.
    """

    diff_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    apply_s: float = 0.0
    verify_s: float = 0.0
    reload_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return self.diff_s + self.encode_s + self.decode_s + self.apply_s + self.verify_s + self.reload_s


NO_COST = SyncCost()


def _check(nbytes: float, bandwidth: float) -> None:
    if nbytes < 0 or bandwidth <= 0:
        raise ValueError(f"bytes must be at least 0 and bits per second above 0, not {nbytes} and {bandwidth}")


def sync_seconds(nbytes: float, bits_per_s: float, *, cost: SyncCost = NO_COST, latency_s: float = 0.0) -> float:
    """Seconds of one sync: transfer of ``nbytes`` over a link of ``bits_per_s``, latency, and all other parts."""
    _check(nbytes, bits_per_s)
    return 8 * nbytes / bits_per_s + latency_s + cost.total_s


def utilisation(compute_s: float, sync_s: float) -> float:
    """Share of time that is spent computing: T_c / (T_c + T_sync)."""
    if compute_s <= 0 or sync_s < 0:
        raise ValueError(f"compute must take more than 0 s and a sync at least 0 s, not {compute_s} and {sync_s}")
    return compute_s / (compute_s + sync_s)


def bandwidth_needed(nbytes: float, compute_s: float, share: float, *, cost: SyncCost = NO_COST) -> float:
    """Bits per second that a utilisation of ``share`` needs.

    Raises:
        ValueError: ``share`` is not between 0 and 1, or the parts besides the transfer alone take too long for it.
    """
    if not 0 < share < 1 or compute_s <= 0:
        raise ValueError(f"utilisation must lie between 0 and 1 and compute above 0 s, not {share} and {compute_s}")
    left = compute_s * (1 - share) / share - cost.total_s
    if left <= 0:
        raise ValueError(f"{share:.0%} cannot be reached: {cost.total_s:.3g} s pass besides the transfer")
    return 8 * nbytes / left


def chain_bytes(densities: Sequence[float], cells: int, bytes_per_change: float) -> float:
    """Bytes of a chain of patches with these densities; one merged patch over k steps has the density 1 - S_k."""
    return sum(densities) * cells * bytes_per_change


def join_bytes(anchor_bytes: float, patch_bytes: float, anchor_every: int) -> float:
    """Most bytes that a late receiver fetches: an anchor and the patches until just before the next one."""
    return anchor_bytes + (anchor_every - 1) * patch_bytes
