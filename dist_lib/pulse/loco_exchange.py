"""What the workers of an outer loop say to each other: who stands where, sizes first, then updates of any length.

Every exchange begins with a header that all workers compare, so a worker that does something else is an error on all
of them and never a wrong sum. Sums run in rank order and start from zero, whether values come dense or sparse: both
ways give the same bits. A collective that fails means that a worker is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_lib.comm import agree, collectives
from dist_lib.comm.agreement import AgreementError
from dist_lib.pulse.codecs import SEGMENT
from dist_lib.pulse.errors import CorruptPatchError, PulseError
from dist_lib.pulse.loco_config import DesyncError, WorkerLostError, padded_cells
from dist_lib.pulse.state import as_bytes, in_threads

_KINDS = {"round": 1, "load": 2, "save": 3, "resume": 4}


def _hash(part: Tensor) -> bytes:
    data: Any = as_bytes(part)
    return hashlib.sha256(data).digest()


def digest_flat(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of 1-D tensors in hexadecimal: hash of the hashes of their segments of 2^22 elements."""
    parts = [part for tensor in tensors for part in tensor.split(SEGMENT)]
    hashes = in_threads(_hash, parts)
    return hashlib.sha256(b"".join(hashes)).hexdigest()


class Channel:
    """Exchanges of one group; every method that says so is to be called by all of its workers.

    Args:
        group: default: all ranks. Its timeout bounds every wait.

    Raises:
        PulseError: there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise PulseError("an outer loop needs a process group: use dist_lib.comm.distributed() or launch()")
        self.group = group
        self.rank, self.workers = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except (PulseError, AgreementError):
            raise
        except RuntimeError as error:
            waited = time.monotonic() - begin
            raise WorkerLostError(
                f"rank {self.rank} of {self.workers}: {what} failed after {waited:.1f} s: a worker is lost, or slower "
                f"than the group's timeout ({error}). Start all workers again and resume() from the last complete "
                f"checkpoint"
            ) from error

    def agree(self, value: Any, what: str) -> None:
        """Compare a value over all workers.

        Raises:
            AgreementError: on all of them, naming those that differ.
            WorkerLostError: a worker does not answer.
        """
        with self._guard(f"comparing {what}"):
            agree(value, what=what, group=self.group)

    def announce(self, kind: str, round: int, inner_step: int, number: int) -> list[int]:
        """Tell all workers what follows, and where this one stands; return the ``number`` of each, in rank order.

        Raises:
            DesyncError: on all workers, if they do not call the same at the same place.
            WorkerLostError: a worker does not answer.
        """
        mine = torch.tensor([_KINDS[kind], round, inner_step, number], dtype=torch.int64, device=self.device)
        with self._guard(f"the header of {kind!r}"):
            rows = collectives.all_gather(mine, group=self.group).tolist()
        if len({tuple(row[:3]) for row in rows}) > 1:
            names = {code: name for name, code in _KINDS.items()}
            seen = ", ".join(f"rank {i}: {names.get(r[0], r[0])} at {r[1]}.{r[2]}" for i, r in enumerate(rows))
            raise DesyncError(f"the workers do different things (round.step): {seen}; call the same on every worker")
        return [int(row[3]) for row in rows]

    def gather(self, payload: bytes, sizes: Sequence[int], bound: int) -> list[memoryview]:
        """All workers' payloads in rank order; ``sizes`` are those announced, -1 for none.

        Raises:
            CorruptPatchError: on all workers, a size above ``bound``.
            WorkerLostError: a worker does not answer.
        """
        largest = max(0, *sizes)
        if largest > bound:
            raise CorruptPatchError(f"updates of {list(sizes)} bytes were announced; {bound} bound any valid one")
        row = torch.zeros(largest, dtype=torch.uint8)
        if payload:
            row[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        with self._guard("the gather of updates"):
            rows = collectives.all_gather(row.to(self.device), group=self.group).cpu().numpy()
        return [memoryview(rows[i])[: max(0, size)] for i, size in enumerate(sizes)]

    def dense_sum(self, vector: Tensor) -> Tensor:
        """Sum of a 1-D FP32 vector over workers, in rank order from zero: shares to their owners, sums back.

        Raises:
            WorkerLostError: a worker does not answer.
        """
        cells = vector.numel()
        padded = torch.zeros(padded_cells(cells, self.workers), dtype=vector.dtype, device=self.device)
        padded[:cells] = vector
        with self._guard("the exchange of dense updates"):
            rows = collectives.all_to_all_single(padded, group=self.group).view(self.workers, -1)
            total = torch.zeros_like(rows[0])
            for row in rows:
                total += row
            whole = collectives.all_gather(total, group=self.group)
        return whole.reshape(-1)[:cells].to(vector.device)
