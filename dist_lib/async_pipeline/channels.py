"""Messages between neighbouring stages that travel while the stage computes.

Receives are posted before they are needed and sends are not waited for until much later, so that a stage blocks only
on a message that has not been made yet. The shape of a message is agreed once, before the first; there is no header on
the way. What the messages mean is the runtime's business.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dist_lib.async_pipeline.mesh import PipelineError, PipelineMesh
from dist_lib.comm import collectives
from dist_lib.comm.collectives import Pending

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DIMS = 8
AHEAD = 2  # receives posted before they are needed: one that arrives while another is used


@dataclass(frozen=True)
class Message:
    """What every message of a channel looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: object) -> Message:
        """Describe a stage's output.

        Raises:
            TypeError: not one floating-point tensor.
            ValueError: more dimensions than fit into a description.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"a stage returned {kind}; between stages there must be one tensor of float32, 16 or 64")
        if tensor.ndim > _DIMS:
            raise ValueError(f"a stage returned {tensor.ndim} dimensions; at most {_DIMS} can be sent")
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def encoded(self, device: torch.device) -> Tensor:
        """As int64 numbers, to send ahead."""
        numbers = [_DTYPES.index(self.dtype), len(self.shape), *self.shape, *[0] * (_DIMS - len(self.shape))]
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    @classmethod
    def received(cls, src: int, group: dist.ProcessGroup, device: torch.device) -> Message | None:
        """Receive a description; None if the sender has none to give."""
        dtype, ndim, *dims = collectives.recv(
            torch.zeros(2 + _DIMS, dtype=torch.int64, device=device), src, group=group
        ).tolist()
        return None if dtype < 0 else cls(tuple(dims[:ndim]), _DTYPES[dtype])


def send_description(message: Message | None, dst: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send what :meth:`Message.received` receives."""
    nothing = torch.full((2 + _DIMS,), -1, dtype=torch.int64, device=device)
    collectives.send(nothing if message is None else message.encoded(device), dst, group=group)


class Waits:
    """Seconds for which this rank has blocked, by reason."""

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        self.seconds: dict[str, float] = {}

    def wait(self, pending: Pending, reason: str, what: str) -> Tensor:
        """Wait for a transfer.

        Args:
            pending: the transfer.
            reason: under which its time is counted.
            what: it in words, for the error.

        Raises:
            PipelineError: the other rank failed or did not answer in time.
        """
        begin = time.perf_counter()
        try:
            return pending.wait()
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PipelineError(
                f"{self._mesh.place} gave up on {what} after {time.perf_counter() - begin:.1f} s "
                f"(timeout {self._mesh.timeout_s:g} s): {text}"
            ) from error
        finally:
            self.seconds[reason] = self.seconds.get(reason, 0.0) + time.perf_counter() - begin


class Inbox:
    """Receives from one rank, in order, posted ahead.

    Args:
        src: global rank.
        mesh: ranks, device and groups.
        lane: name of the group of this direction: ``"down"``, ``"up"`` or ``"across"``.
        message: what arrives.
        waits: the clock.
        name: of what arrives, ``"activations"`` or ``"gradients"``.
    """

    def __init__(self, src: int, mesh: PipelineMesh, lane: str, message: Message, waits: Waits, name: str) -> None:
        self.src, self._mesh, self._lane, self._message = src, mesh, lane, message
        self._waits, self._name = waits, name
        self._posted: deque[Pending] = deque()
        self._expected = 0

    def expect(self, count: int) -> None:
        """Say that ``count`` more messages will certainly be sent; nothing is posted beyond them."""
        self._expected += count
        self._post()

    def _post(self) -> None:
        while self._expected and len(self._posted) < AHEAD:
            self._posted.append(
                collectives.irecv(self._message.empty(self._mesh.device), self.src, group=self._mesh.group(self._lane))
            )
            self._expected -= 1

    def take(self, what: str) -> Tensor:
        """The next message; ``what`` names it in errors.

        Raises:
            PipelineError: it did not come.
        """
        if not self._posted:
            raise PipelineError(f"{self._name} {what} was taken without having been expected")
        tensor = self._waits.wait(self._posted.popleft(), self._name, f"{self._name} {what} from rank {self.src}")
        self._post()
        return tensor


class Outbox:
    """Sends to one rank, in order, waited for late.

    Args:
        dst: global rank.
        mesh: ranks, device and groups.
        lane: name of the group of this direction: ``"down"``, ``"up"`` or ``"across"``.
        keep: sends that may be under way at once. With at least p - s of them, waiting for the oldest never waits for
            anything but a message that the receiver must have had already.
        waits: the clock.
        name: of what is sent.
    """

    def __init__(self, dst: int, mesh: PipelineMesh, lane: str, keep: int, waits: Waits, name: str) -> None:
        self._dst, self._mesh, self._lane, self._keep = dst, mesh, lane, keep
        self._waits, self._name = waits, name
        self._sent: deque[Pending] = deque()

    def put(self, tensor: Tensor) -> None:
        """Start sending; the tensor must not be written to any more."""
        self._sent.append(collectives.isend(tensor.detach(), self._dst, group=self._mesh.group(self._lane)))
        self._wait_until(self._keep)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._wait_until(0)

    def _wait_until(self, left: int) -> None:
        while len(self._sent) > left:
            self._waits.wait(self._sent.popleft(), "sends", f"sending {self._name} to rank {self._dst}")
