"""A count of every collective: operation, group, bytes.

The unit is the *payload*: the bytes of the tensor that this rank hands to the operation (its input; for a broadcast
the tensor itself, on every rank; receives are not counted, their sends are). What a link carries depends on the
algorithm and follows from :class:`~dist_lib.comm.NetworkModel`. The count is taken at torch's dispatcher, below every
caller: the functions of :mod:`~dist_lib.comm.collectives`, direct calls of ``torch.distributed``, DDP's reducer, FSDP2,
functional collectives and what DTensor operations send are seen alike, each once. A barrier carries no payload and is
not counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# c10d operator -> our name and the position of the input argument.
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
# The functional collectives; their input is always the first argument. DTensor speaks through these. Their kernels call
# the operators above out of the counter's sight, so nothing is counted twice.
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "isend": "send",
}


@dataclass(frozen=True)
class CommRecord:
    """One tensor of one call: ``op``, ``group`` (its global ranks), payload ``bytes`` and ``dtype``."""

    op: str
    group: tuple[int, ...]
    bytes: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.bytes // self.dtype.itemsize


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _known(func: Any) -> tuple[str, int] | None:
    name = func.__name__.split(".")[0]
    if func.namespace == "c10d":
        return _DISPATCHED.get(name)
    if func.namespace == "_c10d_functional" and name in _FUNCTIONAL:
        return _FUNCTIONAL[name], 0
    return None


def _group(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    if func.namespace == "_c10d_functional":  # the group is the last argument, by name or as itself
        group = args[-1]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
        if isinstance(group, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(group))
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
            except (RuntimeError, TypeError, ValueError):  # the other boxed argument is the reduction
                continue
    return ()


class CommCounter(TorchDispatchMode):
    """Context manager that counts the collectives of this process; may be nested, each sees its own span.

    Attributes:
        records: one :class:`CommRecord` for each tensor of each call, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[CommRecord] = []

    def __enter__(self) -> CommCounter:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__module__.startswith("torch.distributed.tensor") for t in types):
            return NotImplemented  # let a DTensor operation come apart first: what it sends then passes here
        known = _known(func)
        if known is not None:
            op, position = known
            group = _group(func, args)
            for tensor in _tensors(args[position]):
                nbytes = tensor.numel() * tensor.element_size()
                self.records.append(CommRecord(op, group, nbytes, tensor.dtype))
        return func(*args, **(kwargs or {}))

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
