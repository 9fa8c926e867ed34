"""A count of every collective: operation, group, bytes.

The unit is the *payload*: the bytes of the tensor that this rank hands to the operation (its input; for a broadcast
the tensor itself, on every rank; receives are not counted, their sends are). What a link carries depends on the
algorithm and follows from :class:`~dist_lib.comm.NetworkModel`. Inside ``with CommCounter() as counter:`` the
functions of :mod:`~dist_lib.comm.collectives` are counted, and so is what torch does by itself (FSDP2, DDP's
reducer through :meth:`CommCounter.watch_ddp`, direct calls of ``torch.distributed``), once each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# c10d and functional operators by their dispatcher name -> our name and the position of the input argument.
_DISPATCHED = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
}
_active: list[CommCounter] = []


@dataclass(frozen=True)
class CommRecord:
    """One call: ``op``, ``group`` (its ranks), payload ``bytes`` and ``dtype``."""

    op: str
    group: tuple[int, ...]
    bytes: int
    dtype: torch.dtype


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


class _Watch(TorchDispatchMode):
    def __init__(self, counter: CommCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            known = _DISPATCHED.get(func.__name__.split(".")[0])
            if known is not None and not self.counter.inside_ours:
                op, position = known
                for tensor in _tensors(args[position]):
                    self.counter.add(op, tensor, ())
        return func(*args, **(kwargs or {}))


class CommCounter:
    """Context manager that counts collectives of this process; may be nested, each sees its own span.

    Attributes:
        records: one :class:`CommRecord` for each call, in order.
    """

    def __init__(self) -> None:
        self.records: list[CommRecord] = []
        self.inside_ours = False
        self._watch = _Watch(self)

    def __enter__(self) -> CommCounter:
        _active.append(self)
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, value, trace)
        _active.remove(self)

    def add(self, op: str, tensor: Tensor, group: tuple[int, ...]) -> None:
        """Count one operation on ``tensor``."""
        self.records.append(CommRecord(op, group, tensor.numel() * tensor.element_size(), tensor.dtype))

    def bytes(self, op: str | None = None) -> int:
        """Payload bytes of all calls, or of those of one ``op``."""
        return sum(r.bytes for r in self.records if op in (None, r.op))

    def count(self, op: str | None = None) -> int:
        """Number of calls, or of those of one ``op``."""
        return sum(1 for r in self.records if op in (None, r.op))

    def table(self) -> dict[str, tuple[int, int]]:
        """``{op: (count, bytes)}``, sorted by name."""
        out: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for r in self.records:
            out[r.op][0] += 1
            out[r.op][1] += r.bytes
        return {op: (n, b) for op, (n, b) in sorted(out.items())}

    def watch_ddp(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Count DDP's gradient buckets: its reducer runs below the dispatcher, so a communication hook does it.

        The hook averages exactly as DDP's own does (divide, then all-reduce). Call once, before training.
        """
        model.register_comm_hook(self, _counting_hook)


def _counting_hook(counter: CommCounter, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    counter.add("all_reduce", buffer, tuple(range(dist.get_world_size())))
    work = dist.all_reduce(buffer, async_op=True)
    result: Callable[[Any], Tensor] = lambda future: future.value()[0]  # noqa: E731
    return work.get_future().then(result)  # type: ignore[union-attr,no-any-return]


def record(op: str, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Report one collective of ours to every active counter; the call that follows is not counted again."""
    if _active:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        for counter in _active:
            counter.add(op, tensor, ranks)
