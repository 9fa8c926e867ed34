"""Sums over ranks whose wire carries 8 bits a number and whose additions are float32.

>>> all_reduce(gradient, op="mean")           # in place, as torch.distributed.all_reduce
>>> part = reduce_scatter(gradient)           # this rank's slice of dimension 0
>>> reduce(gradient, dst=2)                   # on rank 2 alone, with the bits of all_reduce

Every rank encodes its gradient and sends shard j to rank j; that rank decodes what arrives and adds it in float32, in
rank order; it encodes the sum once, and its bytes go to everybody. So a number is rounded twice on its way, whatever
the number of ranks, and all ranks decode the same bytes. A block that held a NaN or an infinity on any rank is NaN on
all. Nothing is ever added in 8 bits.

Source: AGoQ (arXiv 2605.00539), precision-preserving 8-bit all-reduce; the form by nodes follows ZeRO++ (arXiv
2306.10209), the losses kept for the next time LoCo's idea. One rank alone sends nothing and rounds nothing.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from dist_lib.agoq.wire import GradientFormat, Hops, Ranks, Shards, Started, sum_messages
from dist_lib.ops.quantization import FLOATS

Generator = torch.Generator | int | None
PIECE = 2**19  # numbers of every shard that are encoded and decoded while others are on the wire


def check_gradient(tensor: Tensor) -> None:
    """Raise a TypeError unless ``tensor`` has a dtype that can be encoded."""
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"a gradient of dtype {tensor.dtype} is not summed through 8 bits; allowed are float32, float16, bfloat16 "
            "and float64; for integers use dist_lib.comm.collectives"
        )


def _divisor(op: str, size: int) -> int:
    if op not in ("sum", "mean"):
        raise ValueError(f"op is {op!r}; choose 'sum' or 'mean'")
    return size if op == "mean" else 1


def _check(tensor: Tensor, residual: Tensor | None) -> None:
    check_gradient(tensor)
    if residual is not None and (residual.shape != tensor.shape or residual.dtype != torch.float32):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}; need float32 of shape {tuple(tensor.shape)}"
        )


class Compensation:
    """What encoding loses on this rank, in the unit of the sum, so that it can be sent the next time.

    The owner of a shard counts its own rounding of the sum as its own loss: over all calls, what the ranks received is
    what they put in, less what their residuals hold.
    """

    def __init__(self, residual: Tensor) -> None:
        self._residual = residual
        self.lost: Tensor

    def add_to(self, matrix: Tensor) -> Tensor:
        """The shards with what was lost before, a new float32 tensor."""
        flat = torch.zeros(matrix.numel(), dtype=torch.float32, device=matrix.device)
        flat[: self._residual.numel()] = self._residual.reshape(-1)
        return flat.view(matrix.shape).add_(matrix)

    def sent(self, wanted: Tensor, sent: Shards) -> None:
        """Begin with what the sender's encoding loses."""
        self.lost = wanted.sub_(sent.decode())

    def keep(self) -> None:
        """Write the residual; what a NaN or an infinity spoiled is forgotten."""
        count = self._residual.numel()
        lost = torch.where(self.lost.isfinite(), self.lost, 0.0).view(-1)[:count]
        self._residual.copy_(lost.view(self._residual.shape))


def to_matrix(tensor: Tensor, parts: int) -> Tensor:
    """(parts, length) of any tensor, zeros at the end; a view where it can be."""
    flat = tensor.detach().reshape(-1)
    length = -(-flat.numel() // parts)
    if length * parts != flat.numel():
        padded = flat.new_zeros(length * parts)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(parts, length)


def encode_shards(
    matrix: Tensor, form: GradientFormat, residual: Tensor | None, generator: Generator
) -> tuple[Shards, Compensation | None]:
    """Encode shards (parts, length) for sending, with what was lost before where there is a residual."""
    if residual is None:
        return Shards.encode(matrix, form, generator), None
    compensation = Compensation(residual)
    wanted = compensation.add_to(matrix)
    shards = Shards.encode(wanted, form, generator)
    compensation.sent(wanted, shards)
    return shards, compensation


def sum_and_encode(
    sent: Shards, hops: Hops, divisor: int, lost: Tensor | None = None, generator: Generator = None
) -> Shards:
    """This rank's shard of the sum or mean, encoded (1, length).

    Args:
        sent: this rank's shards, one for each rank.
        hops: the ranks, at least two.
        divisor: 1, or the number of ranks for the mean.
        lost: (ranks, length) float32; what is lost on the way is added to it, in the unit of the sum.
        generator: for stochastic rounding.
    """
    total = hops.scatter_sum(sent, lost, generator).div_(divisor)
    own = Shards.encode(total[None], sent.form, generator)
    if lost is not None:
        lost[hops.rank] += (total - own.decode()[0]) * divisor
    return own


def _write(rows: Tensor, tensor: Tensor, length: int, form: GradientFormat) -> Tensor:
    numbers = Shards.unpack(rows, length, form).decode().view(-1)[: tensor.numel()]
    return tensor.copy_(numbers.view(tensor.shape))


@torch.no_grad()
def all_reduce(
    tensor: Tensor,
    *,
    op: str = "sum",
    form: GradientFormat | None = None,
    group: Ranks = None,
    residual: Tensor | None = None,
    generator: Generator = None,
) -> Tensor:
    """Sum or average over all ranks, in place; the same bits on every rank.

    A number of a block moves by at most ``c (sum over ranks of a_r) + c a`` of the sum, where ``c`` is the codec's
    ``half_gap`` and ``a_r``, ``a`` the largest magnitudes of the block on rank r and in the sum (our derivation).

    Args:
        tensor: any shape, strides and number of elements, the same on all ranks; float32, float16, bfloat16, float64.
        op: ``"sum"`` or ``"mean"``.
        form: default ``int8`` in blocks of 256; the same on all ranks.
        group: a process group (default: all ranks), or a mesh of two dimensions, (nodes, ranks of a node), for two
            hops: fewer bytes between nodes, one rounding more.
        residual: float32 of the shape of ``tensor``, this rank's own: added before sending, and overwritten by what was
            lost (error feedback). Start with zeros.
        generator: for stochastic rounding.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: an unknown ``op``, another shape of ``residual``, or a rank that takes no part.
    """
    _check(tensor, residual)
    hops, form = Hops(group), form or GradientFormat()
    divisor = _divisor(op, hops.size)
    if hops.size == 1 or tensor.numel() == 0:
        return tensor
    matrix = to_matrix(tensor, hops.size)
    if residual is None and not hops.two and matrix.shape[1] > PIECE:
        _reduce_in_pieces(matrix, hops, divisor, form, generator)
        same = matrix.data_ptr() == tensor.data_ptr()
        return tensor if same else tensor.copy_(matrix.view(-1)[: tensor.numel()].view(tensor.shape))
    sent, compensation = encode_shards(matrix, form, residual, generator)
    own = sum_and_encode(sent, hops, divisor, None if compensation is None else compensation.lost, generator)
    if compensation is not None:
        compensation.keep()
    return _write(hops.gather(own), tensor, sent.codes.shape[1], form)


def _reduce_in_pieces(matrix: Tensor, hops: Hops, divisor: int, form: GradientFormat, generator: Generator) -> None:
    """All-reduce shards (ranks, length) in place, piece by piece of their length, in one hop.

    While one piece is exchanged, the one before is added up and the one before that is decoded. A piece is a whole
    number of blocks, so that bytes and (but for stochastic rounding) bits are those of one go.
    """
    spans = [slice(at, min(at + PIECE, matrix.shape[1])) for at in range(0, matrix.shape[1], PIECE)]
    swaps: deque[Started] = deque()
    gathers: deque[Started] = deque()
    for step in range(len(spans) + 2):
        if step < len(spans):
            swaps.append(hops.start_swap(Shards.encode(matrix[:, spans[step]], form, generator)))
        if 0 < step <= len(spans):
            span = spans[step - 1]
            total = sum_messages(swaps.popleft().wait(), span.stop - span.start, form).div_(divisor)
            gathers.append(hops.start_gather(Shards.encode(total[None], form, generator)))
        if step > 1:
            span = spans[step - 2]
            matrix[:, span] = Shards.unpack(gathers.popleft().wait(), span.stop - span.start, form).decode()


@torch.no_grad()
def reduce(
    tensor: Tensor,
    dst: int,
    *,
    op: str = "sum",
    form: GradientFormat | None = None,
    group: Ranks = None,
    residual: Tensor | None = None,
    generator: Generator = None,
) -> Tensor:
    """Sum or average onto global rank ``dst``, in place, with the bits of :func:`all_reduce`; others keep theirs.

    The sum is made in shards on all ranks, which then send them on: ``dst`` receives no more than any rank does in an
    all-reduce. For arguments and errors see :func:`all_reduce`.
    """
    _check(tensor, residual)
    hops, form = Hops(group), form or GradientFormat()
    divisor, owner = _divisor(op, hops.size), hops.index(dst)
    if hops.size == 1 or tensor.numel() == 0:
        return tensor
    sent, compensation = encode_shards(to_matrix(tensor, hops.size), form, residual, generator)
    own = sum_and_encode(sent, hops, divisor, None if compensation is None else compensation.lost, generator)
    if compensation is not None:
        compensation.keep()
    rows = hops.collect(own, owner)
    return tensor if rows is None else _write(rows, tensor, sent.codes.shape[1], form)


@torch.no_grad()
def reduce_scatter(
    tensor: Tensor,
    *,
    op: str = "sum",
    form: GradientFormat | None = None,
    group: Ranks = None,
    residual: Tensor | None = None,
    generator: Generator = None,
) -> Tensor:
    """Sum or average over ranks; return this rank's slice of dimension 0, a new tensor, rounded only by the senders.

    The sum stays in float32 until it becomes the dtype of ``tensor``. For arguments see :func:`all_reduce`.

    Raises:
        ValueError: also, a first dimension that the ranks do not divide (pad it first).
        TypeError: a dtype that is not allowed.
    """
    _check(tensor, residual)
    hops, form = Hops(group), form or GradientFormat()
    divisor, size = _divisor(op, hops.size), hops.size
    if tensor.ndim == 0 or tensor.shape[0] % size:
        raise ValueError(f"shape {tuple(tensor.shape)} cannot be cut into {size} equal parts along dimension 0: pad it")
    shape = (tensor.shape[0] // size, *tensor.shape[1:])
    if size == 1 or tensor.numel() == 0:
        return tensor.detach().clone(memory_format=torch.contiguous_format).view(shape)
    sent, compensation = encode_shards(to_matrix(tensor, size), form, residual, generator)
    total = hops.scatter_sum(sent, None if compensation is None else compensation.lost, generator)
    if compensation is not None:
        compensation.keep()
    return total.div_(divisor).view(shape).to(tensor.dtype)


@torch.no_grad()
def simulate_all_reduce(
    tensors: list[Tensor], *, op: str = "sum", form: GradientFormat | None = None, generator: Generator = None
) -> Tensor:
    """What :func:`all_reduce` in one hop gives to ranks that hold ``tensors``; in this process, nothing is sent.

    With nearest rounding the bits are those of the ranks.
    """
    form, size = form or GradientFormat(), len(tensors)
    divisor = _divisor(op, size)
    if size < 2 or tensors[0].numel() == 0:
        return tensors[0].detach().clone()
    total = Shards.encode(to_matrix(tensors[0], size), form, generator).decode()
    for tensor in tensors[1:]:
        total += Shards.encode(to_matrix(tensor, size), form, generator).decode()
    return _shaped(Shards.encode(total.div_(divisor), form, generator), tensors[0])


@torch.no_grad()
def simulate_ring(
    tensors: list[Tensor], *, op: str = "sum", form: GradientFormat | None = None, generator: Generator = None
) -> Tensor:
    """A ring that encodes at every hop, for comparison: its error grows with the number of ranks.

    Shard j starts on rank j + 1 and goes round; each rank decodes what arrives, adds its own and encodes again.
    """
    form, size = form or GradientFormat(), len(tensors)
    divisor = _divisor(op, size)
    if size < 2 or tensors[0].numel() == 0:
        return tensors[0].detach().clone()
    matrices = [to_matrix(t, size).float() for t in tensors]
    shard = torch.arange(size)
    stacked = torch.stack(matrices)  # (rank, shard, length)
    at = Shards.encode(stacked[(shard + 1) % size, shard], form, generator)
    for hop in range(2, size + 1):
        total = at.decode() + stacked[(shard + hop) % size, shard]
        at = Shards.encode(total.div_(divisor) if hop == size else total, form, generator)
    return _shaped(at, tensors[0])


def _shaped(shards: Shards, like: Tensor) -> Tensor:
    return torch.empty_like(like).copy_(shards.decode().view(-1)[: like.numel()].view(like.shape))
