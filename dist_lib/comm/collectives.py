"""Collectives that cannot go wrong silently, and that are counted.

torch's gloo backend computes wrong sums on non-contiguous tensors and wraps int8 sums without a word. Here every
tensor goes through a contiguous copy where it must, integer types too narrow for a sum are refused, bfloat16 and
float16 are summed in float32. This module moves tensors; what they mean belongs to its callers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_REDUCIBLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_MOVABLE = (*_REDUCIBLE, torch.int8, torch.uint8, torch.bool)


def _check(tensor: Tensor, allowed: tuple[torch.dtype, ...], what: str) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        hint = (
            "convert to int32 or float32 before the sum"
            if allowed is _REDUCIBLE
            else "send its bytes as uint8: tensor.contiguous().view(torch.uint8)"
        )
        raise TypeError(f"{what} of dtype {tensor.dtype} is not allowed; allowed are {names}; {hint}")


def _op(op: str) -> dist.ReduceOp.RedOpType:
    if op not in _OPS:
        raise ValueError(f"op {op!r}: allowed are {sorted(_OPS)}; divide a sum by the world size for a mean")
    return _OPS[op]


def _wide(tensor: Tensor) -> Tensor:
    """A contiguous tensor to reduce in: float32 for the half types, else the same dtype; may be ``tensor`` itself."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.to(torch.float32, memory_format=torch.contiguous_format)
    return tensor.contiguous()


def _back(buffer: Tensor, tensor: Tensor) -> None:
    if buffer.data_ptr() != tensor.data_ptr() or buffer.dtype != tensor.dtype:
        tensor.copy_(buffer)


def world(group: Group = None) -> int:
    """Number of ranks in ``group``."""
    return dist.get_world_size(group)


class Pending:
    """A transfer on its way. It holds its buffers; the tensor is whole, or may be reused, after :meth:`wait`."""

    def __init__(self, work: dist.Work | None, buffer: Tensor, tensor: Tensor, finish: Callable[[], None]) -> None:
        self._work, self._buffer, self._tensor, self._finish = work, buffer, tensor, finish
        self._done = False

    def wait(self) -> Tensor:
        """Block until the transfer is complete and return its tensor; a second call changes nothing."""
        if not self._done:
            if self._work is not None:
                self._work.wait()
            with torch.no_grad():
                self._finish()
            self._done = True
        return self._tensor


@overload
def all_reduce(tensor: Tensor, *, op: str = "sum", group: Group = None, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, *, op: str = "sum", group: Group = None, async_op: Literal[True]) -> Pending: ...
@torch.no_grad()
def all_reduce(tensor: Tensor, *, op: str = "sum", group: Group = None, async_op: bool = False) -> Tensor | Pending:
    """Reduce ``tensor`` over all ranks, in place; any strides; half types are summed in float32.

    With ``async_op`` return at once; ``tensor`` holds the result after ``wait()`` on what is returned.

    Raises:
        TypeError: a dtype that cannot hold a sum, such as int8.
        ValueError: an unknown ``op``.
    """
    _check(tensor, _REDUCIBLE, "a reduction")
    buffer = _wide(tensor)
    work = dist.all_reduce(buffer, op=_op(op), group=group, async_op=async_op)
    pending = Pending(work, buffer, tensor, lambda: _back(buffer, tensor))
    return pending if async_op else pending.wait()


@torch.no_grad()
def reduce(tensor: Tensor, dst: int, *, op: str = "sum", group: Group = None) -> Tensor:
    """Reduce onto global rank ``dst``; elsewhere ``tensor`` keeps its value (gloo itself would overwrite it)."""
    _check(tensor, _REDUCIBLE, "a reduction")
    mine = dist.get_rank() == dst
    buffer = _wide(tensor)
    if not mine and buffer.data_ptr() == tensor.data_ptr():
        buffer = buffer.clone()
    dist.reduce(buffer, dst, op=_op(op), group=group)
    if mine:
        _back(buffer, tensor)
    return tensor


@torch.no_grad()
def broadcast(tensor: Tensor, src: int, *, group: Group = None) -> Tensor:
    """Overwrite ``tensor`` with that of global rank ``src``, in place; any strides."""
    _check(tensor, _MOVABLE, "a broadcast")
    buffer = tensor.contiguous()
    dist.broadcast(buffer, src, group=group)
    _back(buffer, tensor)
    return tensor


@torch.no_grad()
def all_gather(tensor: Tensor, *, group: Group = None) -> Tensor:
    """Return the tensors of all ranks stacked in rank order: (world, \\*tensor.shape). All shapes must be equal."""
    out = tensor.new_empty((world(group), *tensor.shape))
    return all_gather_into(out, tensor, group=group)


@torch.no_grad()
def all_gather_into(out: Tensor, tensor: Tensor, *, group: Group = None) -> Tensor:
    """Write the tensors of all ranks into ``out`` in rank order; any strides of either.

    Args:
        out: (world, \\*tensor.shape), of the same dtype.
        tensor: this rank's; all ranks' shapes must be equal.

    Raises:
        ValueError: another shape or dtype of ``out``.
    """
    _check(tensor, _MOVABLE, "a gather")
    shape = (world(group), *tensor.shape)
    if out.shape != shape or out.dtype != tensor.dtype:
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; need {shape} {tensor.dtype}")
    source, buffer = tensor.contiguous(), out.contiguous()
    if source.numel():
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(buffer.view(-1), source.view(-1), group=group)
    _back(buffer, out)
    return out


@torch.no_grad()
def reduce_scatter(tensor: Tensor, *, group: Group = None) -> Tensor:
    """Sum over ranks and return this rank's slice of dimension 0, which the world size must divide.

    Raises:
        ValueError: an indivisible first dimension (pad it first).
    """
    _check(tensor, _REDUCIBLE, "a reduction")
    parts = world(group)
    if tensor.ndim == 0 or tensor.shape[0] % parts:
        raise ValueError(
            f"shape {tuple(tensor.shape)} cannot be cut into {parts} equal parts along dimension 0: pad it"
        )
    source = _wide(tensor)
    out = source.new_empty((source.shape[0] // parts, *source.shape[1:]))
    if source.numel():
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out.view(-1), source.view(-1), group=group)
    return out.to(tensor.dtype)


@torch.no_grad()
def all_to_all(parts: Sequence[Tensor], receive: Sequence[int], *, group: Group = None) -> list[Tensor]:
    """Send ``parts[j]`` (1-D) to rank j; return what each rank sent here.

    Args:
        parts: one 1-D tensor a rank, all of one dtype; empty ones are fine.
        receive: number of elements to expect from each rank.

    Raises:
        ValueError: a number of parts or sizes other than the world size, or parts that are not 1-D.
    """
    size = world(group)
    if len(parts) != size or len(receive) != size or any(p.ndim != 1 for p in parts):
        raise ValueError(f"got {len(parts)} parts and {len(receive)} sizes; need {size} 1-D tensors and {size} sizes")
    source = torch.cat([p.contiguous() for p in parts])
    _check(source, _MOVABLE, "an all-to-all")
    out = source.new_empty(sum(receive))
    dist.all_to_all_single(out, source, list(receive), [p.numel() for p in parts], group=group)
    return list(out.split(list(receive)))


@torch.no_grad()
def all_to_all_single(tensor: Tensor, *, group: Group = None) -> Tensor:
    """Send block j of dimension 0 to rank j; return the blocks received, in rank order, with the shape of ``tensor``.

    Raises:
        ValueError: a first dimension that the world size does not divide.
    """
    size = world(group)
    if tensor.ndim == 0 or tensor.shape[0] % size:
        raise ValueError(f"shape {tuple(tensor.shape)} cannot be cut into {size} equal parts along dimension 0: pad it")
    count = tensor.numel() // size
    parts = all_to_all(
        list(tensor.reshape(-1).split(count)) if count else [tensor.reshape(-1)] * size, [count] * size, group=group
    )
    return torch.cat(parts).view(tensor.shape)


@torch.no_grad()
def send(tensor: Tensor, dst: int, *, group: Group = None, tag: int = 0) -> None:
    """Send to global rank ``dst``; returns when the tensor may be reused."""
    isend(tensor, dst, group=group, tag=tag).wait()


@torch.no_grad()
def recv(tensor: Tensor, src: int, *, group: Group = None, tag: int = 0) -> Tensor:
    """Receive from global rank ``src`` into ``tensor``, in place; any strides."""
    return irecv(tensor, src, group=group, tag=tag).wait()


@torch.no_grad()
def irecv(tensor: Tensor, src: int, *, group: Group = None, tag: int = 0) -> Pending:
    """Start receiving from global rank ``src``; ``tensor`` is filled by ``wait()`` on what is returned; any strides.

    Raises:
        ValueError: a receive from this rank itself, which no backend supports.
    """
    _check(tensor, _MOVABLE, "a receive")
    if src == dist.get_rank():
        raise ValueError(f"rank {src} cannot receive from itself")
    buffer = tensor.contiguous()
    work = dist.irecv(buffer, src, group=group, tag=tag)
    return Pending(work, buffer, tensor, lambda: _back(buffer, tensor))


@torch.no_grad()
def isend(tensor: Tensor, dst: int, *, group: Group = None, tag: int = 0) -> Pending:
    """Start sending to global rank ``dst``; keep the result and call ``wait()`` on it.

    Raises:
        ValueError: a send to this rank itself, which no backend supports.
    """
    _check(tensor, _MOVABLE, "a send")
    if dst == dist.get_rank():
        raise ValueError(f"rank {dst} cannot send to itself")
    buffer = tensor.contiguous()
    return Pending(dist.isend(buffer, dst, group=group, tag=tag), buffer, tensor, lambda: None)


def barrier(*, group: Group = None) -> None:
    """Wait for all ranks of ``group``."""
    dist.barrier(group=group)


@torch.no_grad()
def ordered_sum(tensor: Tensor, *, group: Group = None) -> Tensor:
    """Sum over ranks in rank order, with the same bits on every rank and every backend; returns a new float tensor.

    Gathers all inputs (world times the memory and the bytes of a ring) and adds them one by one, in float32 for half
    types. For references and small tensors.
    """
    _check(tensor, _REDUCIBLE, "a reduction")
    rows = all_gather(_wide(tensor), group=group)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.to(tensor.dtype)
