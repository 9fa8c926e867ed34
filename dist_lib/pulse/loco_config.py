"""Options, counts and errors of the outer loops: PULSELoCo, dense DiLoCo and data parallelism under one interface.

Bytes are integers and follow from formulas. *Payload* is what a rank hands to its collectives, the unit of
:class:`~dist_lib.comm.CommCounter`; *wire* is what its link then sends with ring algorithms, the unit of
:class:`~dist_lib.comm.NetworkModel`. The two rank the methods differently: an all-gather sends its payload to every
other worker, a dense reduction does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dist_lib.comm import NetworkModel
from dist_lib.pulse.errors import PulseError

FLOAT_BYTES = 4
HEADER_BYTES = 32  # four int64: what follows, round, inner step, payload bytes (-1: this worker is dropped)
DIGEST_BYTES = 32


class WorkerLostError(PulseError):
    """Another worker died, hung or left: this round cannot be completed. Start again from the last checkpoint."""


class DesyncError(PulseError):
    """Workers called different things, or stand at different rounds; raised on all of them alike."""


class NonFiniteError(PulseError):
    """No worker has finite values, or the consensus itself stopped being finite; raised on all workers alike."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Options of an outer loop; the same on every worker. Defaults are those of the paper and its repository.

    Attributes:
        inner_steps: optimizer steps of each worker in a round, H.
        outer_lr: step size alpha of the outer optimizer.
        outer_momentum: Nesterov momentum mu of the outer optimizer; 0 for none.
        gate_dtype: what forward passes cast weights to, ``torch.bfloat16`` or ``torch.float16``; a coordinate is sent
            where that cast shows its update. None sends all coordinates.
        digest_every: rounds between proofs that all workers hold the same bits; hashing reads 8 bytes a parameter.

    Raises:
        ValueError: a value outside its range.
    """

    inner_steps: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    gate_dtype: torch.dtype | None = torch.bfloat16
    digest_every: int = 1

    def __post_init__(self) -> None:
        if self.inner_steps < 1 or self.digest_every < 1:
            raise ValueError(
                f"inner_steps is {self.inner_steps} and digest_every {self.digest_every}; both must be at least 1"
            )
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ValueError(f"outer_lr is {self.outer_lr}; it must be finite and above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum is {self.outer_momentum}; it must lie in [0, 1)")
        if self.gate_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"gate_dtype is {self.gate_dtype}; allowed are torch.bfloat16, torch.float16 and None")


@dataclass(frozen=True, kw_only=True)
class RoundMetrics:
    """What one round moved, as this worker saw it.

    Attributes:
        round: completed rounds, this one included.
        workers: how many took part, R.
        dropped: ranks whose values were not finite, so that they contributed nothing.
        cells: parameters, d.
        sent_cells: coordinates that this worker sent.
        union_cells: coordinates that at least one worker sent.
        payload_bytes: this worker's coded update, before padding; 0 where it was dropped.
        counted_bytes: all that this rank handed to collectives in this round, as a counter sees it.
        wire_bytes: bytes that this rank's link sends for it with ring algorithms.
        error_norm: Euclidean norm of this worker's error-feedback buffer afterwards.
        digest: SHA-256 of parameters and momentum in hexadecimal, equal on all workers; empty in a round without.
    """

    round: int
    workers: int
    dropped: tuple[int, ...]
    cells: int
    sent_cells: int
    union_cells: int
    payload_bytes: int
    counted_bytes: int
    wire_bytes: int
    error_norm: float
    digest: str

    @property
    def gate_density(self) -> float:
        """Share of coordinates that this worker sent."""
        return self.sent_cells / self.cells

    @property
    def union_density(self) -> float:
        """Share of coordinates that any worker sent."""
        return self.union_cells / self.cells

    @property
    def dense_bytes(self) -> int:
        """Payload of a dense exchange, four bytes a parameter, as the paper counts DiLoCo."""
        return FLOAT_BYTES * self.cells

    @property
    def compression(self) -> float:
        """Dense payload over this worker's payload; infinite where nothing was sent."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else math.inf

    @property
    def wire_compression(self) -> float:
        """The same ratio for what links send, messages and digests included; NaN for one worker, who sends nothing."""
        if self.workers == 1:
            return math.nan
        return dense_wire_bytes(self.cells, self.workers, digest=bool(self.digest)) / self.wire_bytes


def padded_cells(cells: int, workers: int) -> int:
    """``cells`` rounded up to a multiple of ``workers``: the dense exchange cuts equal shares."""
    return -(-cells // workers) * workers


def sparse_counted_bytes(largest_payload: int, *, digest: bool = True) -> int:
    """Payload of a sparse round: header, the largest worker's coded update (all are padded to it), digest."""
    return HEADER_BYTES + largest_payload + DIGEST_BYTES * digest


def sparse_wire_bytes(largest_payload: int, workers: int, *, digest: bool = True) -> int:
    """Bytes that one link sends in a sparse round: an all-gather passes each payload through all links but one."""
    return int(NetworkModel.wire_bytes("all_gather", sparse_counted_bytes(largest_payload, digest=digest), workers))


def dense_counted_bytes(cells: int, workers: int, *, digest: bool = True) -> int:
    """Payload of a dense exchange in fixed order: shares to their owners, sums back; header and digest."""
    share = FLOAT_BYTES * padded_cells(cells, workers) // workers
    return HEADER_BYTES + share * workers + share + DIGEST_BYTES * digest


def dense_wire_bytes(cells: int, workers: int, *, digest: bool = True) -> int:
    """Bytes that one link sends in a dense exchange: 2 (R - 1) / R of the vector, as in a ring all-reduce."""
    share = FLOAT_BYTES * padded_cells(cells, workers) // workers
    small = HEADER_BYTES + DIGEST_BYTES * digest
    return (workers - 1) * (2 * share + small)
