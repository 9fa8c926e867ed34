"""What goes over the wire when gradients are summed through 8 bits, and by which hops.

A gradient is cut into as many shards as there are ranks. A shard travels as one message, scales first and codes behind
them, so that a hop is one collective. No hop adds: a message is decoded where it arrives, and added in float32. This
module knows messages, hops and their bytes; what is reduced, and for whom, is in :mod:`dist_lib.agoq.collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dist_lib.comm import collectives
from dist_lib.ops import CODECS, Quantized, quantize
from dist_lib.ops.quantization import check_choice, rounding_seed

SCALE_BYTES = 4
Ranks = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class GradientFormat:
    """How gradients are stored and sent: 8 bits a number, a float32 scale a block.

    float16 scales are no choice: gradients reach far below its range.

    Attributes:
        codec: a format of 8 bits. AGoQ's release uses ``"dynamic8"``; ``"int8"`` erred least on the gradients that we
            measured, ``"dynamic8"`` where a block holds few numbers much larger than the rest.
        block_size: numbers that share a scale.
        rounding: ``"nearest"``, or ``"stochastic"``, right on average.

    Raises:
        ValueError: a format of fewer bits, an unknown block size or rounding.
    """

    codec: str = "int8"
    block_size: int = 256
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_choice(self.codec, self.block_size, torch.float32)
        if CODECS[self.codec].bits != 8:
            eights = ", ".join(name for name, codec in CODECS.items() if codec.bits == 8)
            raise ValueError(f"codec is {self.codec!r}; gradients take a format of 8 bits: {eights}")
        rounding_seed(self.rounding, 0)

    def blocks(self, length: int) -> int:
        """Blocks that ``length`` numbers make; the last may be short."""
        return -(-length // self.block_size)

    def message_bytes(self, length: int) -> int:
        """Bytes of the message of a shard of ``length`` numbers: scales and codes, filled up to whole scales."""
        return SCALE_BYTES * (self.blocks(length) + -(-length // SCALE_BYTES))


@dataclass(frozen=True)
class Shards:
    """Shards of a gradient in codes.

    Attributes:
        codes: (parts, length) uint8, contiguous.
        scales: (parts, blocks) float32, contiguous; NaN marks a block that held a NaN or an infinity.
        form: how they are coded.
    """

    codes: Tensor
    scales: Tensor
    form: GradientFormat

    @staticmethod
    def encode(matrix: Tensor, form: GradientFormat, generator: torch.Generator | int | None = None) -> Shards:
        """Encode ``matrix`` (parts, length); a block never spans two shards."""
        q = quantize(matrix, form.codec, form.block_size, rounding=form.rounding, generator=generator)
        return Shards(q.codes, q.scales, form)

    def decode(self) -> Tensor:
        """The numbers, (parts, length) float32."""
        shape = self.codes.shape
        return Quantized(
            self.codes, self.scales, shape, torch.float32, self.form.codec, self.form.block_size
        ).dequantize()

    def row(self, part: int) -> Shards:
        """One shard of them, a view."""
        return Shards(self.codes[part : part + 1], self.scales[part : part + 1], self.form)

    def pack(self) -> Tensor:
        """One message a shard: (parts, ``message_bytes``) uint8."""
        parts, length = self.codes.shape
        split = SCALE_BYTES * self.scales.shape[1]
        rows = self.codes.new_zeros((parts, self.form.message_bytes(length)))
        rows[:, :split] = self.scales.view(torch.uint8)
        rows[:, split : split + length] = self.codes
        return rows

    @staticmethod
    def unpack(rows: Tensor, length: int, form: GradientFormat) -> Shards:
        """The shards, copied, of the messages ``rows`` (parts, ``message_bytes``)."""
        split = SCALE_BYTES * form.blocks(length)
        scales = rows[:, :split].contiguous().view(torch.float32)
        return Shards(rows[:, split : split + length].contiguous(), scales, form)


def sum_messages(rows: Tensor, length: int, form: GradientFormat) -> Tensor:
    """Decode messages (parts, ``message_bytes``) one by one and add them in float32, in that order: (length,)."""
    total: Tensor | None = None
    for row in rows:
        part = Shards.unpack(row[None], length, form).decode()[0]
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("there are no messages to add")
    return total


@dataclass(frozen=True)
class Started:
    """Messages on their way.

    Attributes:
        received: where they arrive.
        sent: what is sent; kept until it is.
        work: torch's handle.
    """

    received: Tensor
    sent: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """The messages, when they are there."""
        self.work.wait()
        return self.received


class Hops:
    """The ranks that take part, and how messages travel between them.

    Args:
        ranks: a process group (default: all ranks), in which every rank sends to every other; or a mesh of two
            dimensions, (nodes, ranks of a node): then messages go within a node first, are added there, and one sum a
            node goes on to the others.

    Attributes:
        size: ranks that take part.
        rank: this rank's index among them; in a mesh, row by row.

    Raises:
        ValueError: a mesh of other than two dimensions, or a rank that takes no part.
    """

    def __init__(self, ranks: Ranks = None) -> None:
        self.nodes, self.local = 1, 1
        if isinstance(ranks, DeviceMesh):
            if ranks.ndim != 2:
                raise ValueError(f"the mesh has {ranks.ndim} dimensions; need two: (nodes, ranks of a node)")
            self.members: list[int] = ranks.mesh.flatten().tolist()
            self.nodes, self.local = ranks.size(0), ranks.size(1)
            self._across, self._inside = ranks.get_group(0), ranks.get_group(1)
            self._group: dist.ProcessGroup | None = self._inside if self.nodes == 1 else self._across
        else:
            self.members = dist.get_process_group_ranks(ranks or dist.group.WORLD)
            self._group = ranks
        self.size = len(self.members)
        if dist.get_rank() not in self.members:
            raise ValueError(f"rank {dist.get_rank()} takes no part: the ranks are {self.members}")
        self.rank = self.members.index(dist.get_rank())

    @property
    def two(self) -> bool:
        """Whether messages take two hops, which they do with several nodes of several ranks."""
        return self.nodes > 1 and self.local > 1

    def index(self, rank: int) -> int:
        """Index of a global rank.

        Raises:
            ValueError: it takes no part.
        """
        if rank not in self.members:
            raise ValueError(f"rank {rank} takes no part: the ranks are {self.members}")
        return self.members.index(rank)

    def scatter_sum(
        self, sent: Shards, lost: Tensor | None = None, generator: torch.Generator | int | None = None
    ) -> Tensor:
        """Sum over ranks of this rank's shard: (length,) float32.

        With two hops what a node adds up is encoded once more on its way.

        Args:
            sent: this rank's shards, one for each rank.
            lost: (ranks, length) float32; what the encoding between two hops loses is added to it.
            generator: for stochastic rounding.
        """
        length, form = sent.codes.shape[1], sent.form
        rows = sent.pack()
        if not self.two:
            return sum_messages(_swap(rows, self._group), length, form)
        by_local = rows.view(self.nodes, self.local, -1).transpose(0, 1).contiguous()
        received = _swap(by_local, self._inside)
        node_sums = torch.stack([sum_messages(received[:, m], length, form) for m in range(self.nodes)])
        again = Shards.encode(node_sums, form, generator)
        if lost is not None:
            lost[self.rank % self.local :: self.local] += node_sums - again.decode()
        return sum_messages(_swap(again.pack(), self._across), length, form)

    def start_swap(self, sent: Shards) -> Started:
        """Begin to exchange shards in one hop: waiting gives everybody's message for this rank, in rank order."""
        rows = sent.pack()
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self._group, async_op=True)
        return Started(received, rows, work)

    def start_gather(self, own: Shards) -> Started:
        """Begin what :meth:`gather` does in one hop: waiting gives the messages of all ranks."""
        row = own.pack()[0]
        rows = row.new_empty((self.size, row.numel()))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Started(rows, row, gather(rows.view(-1), row, group=self._group, async_op=True))

    def gather(self, own: Shards) -> Tensor:
        """Everybody's message, with the same bytes on every rank: (ranks, ``message_bytes``)."""
        row = own.pack()[0]
        if not self.two:
            return collectives.all_gather(row, group=self._group)
        rows = collectives.all_gather(collectives.all_gather(row, group=self._across), group=self._inside)
        return rows.transpose(0, 1).reshape(self.size, -1)

    def collect(self, own: Shards, owner: int) -> Tensor | None:
        """Everybody's message on rank index ``owner`` alone, as from :meth:`gather`; None elsewhere."""
        row = own.pack()[0]
        if not self.two:
            return _to_one(row, owner, self.rank, self._group)
        node, local = divmod(owner, self.local)
        column = _to_one(row, node, self.rank // self.local, self._across)
        if column is None:
            return None
        rows = _to_one(column.flatten(), local, self.rank % self.local, self._inside)
        return None if rows is None else rows.view(self.local, self.nodes, -1).transpose(0, 1).reshape(self.size, -1)


def _swap(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Row j to rank j of the group; rows from all, in rank order. ``rows`` are contiguous bytes."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received


def _to_one(row: Tensor, target: int, rank: int, group: dist.ProcessGroup | None) -> Tensor | None:
    size = collectives.world(group)
    parts = [row if j == target else row[:0] for j in range(size)]
    counts = [row.numel() if rank == target else 0] * size
    received = collectives.all_to_all(parts, counts, group=group)
    return torch.stack(received) if rank == target else None


@dataclass(frozen=True)
class WireBytes:
    """Bytes of one call on one rank.

    Attributes:
        all_to_all: payload of its all-to-alls, as :class:`~dist_lib.comm.CommCounter` counts it.
        all_gather: payload of its all-gathers.
        sent: bytes that leave the rank, to itself not counted; an all-gather sends its payload to every other rank.
        between_nodes: those of ``sent`` that leave the node; all of them if every rank is a node.
    """

    all_to_all: int
    all_gather: int
    sent: int
    between_nodes: int


def wire_bytes(
    call: str, numel: int, world: int, form: GradientFormat | None = None, *, ranks_per_node: int = 1, hops: int = 1
) -> WireBytes:
    """Bytes of ``"all_reduce"``, ``"reduce_scatter"`` or ``"reduce"`` (on a rank of another node than the owner's).

    With ``ranks_per_node`` and one hop the flat form is meant, on such nodes; with ``hops=2`` the form by nodes.

    Args:
        numel: elements of the whole gradient.
        world: ranks.

    Raises:
        ValueError: an unknown call, ranks that do not fill nodes, or another number of hops.
    """
    if call not in ("all_reduce", "reduce_scatter", "reduce"):
        raise ValueError(f"call is {call!r}; choose 'all_reduce', 'reduce_scatter' or 'reduce'")
    if world < 1 or ranks_per_node < 1 or world % ranks_per_node or hops not in (1, 2):
        raise ValueError(f"{world} ranks on nodes of {ranks_per_node} in {hops} hops: need whole nodes and 1 or 2 hops")
    chosen = form or GradientFormat()
    message = chosen.message_bytes(-(-numel // world)) if world > 1 and numel else 0
    local, nodes = ranks_per_node, world // ranks_per_node
    far = world - local  # ranks on other nodes
    if hops == 1 or local == 1 or nodes == 1:
        to_all, out, away = world, world - 1, far
        extra = {"all_reduce": (0, 1, world - 1, far), "reduce": (1, 0, 1, 1), "reduce_scatter": (0, 0, 0, 0)}[call]
    else:
        to_all, out, away = world + nodes, (local - 1) * nodes + nodes - 1, nodes - 1
        gathered = (0, 1 + nodes, nodes - 1 + nodes * (local - 1), nodes - 1)
        extra = {"all_reduce": gathered, "reduce": (1, 0, 1, 1), "reduce_scatter": (0, 0, 0, 0)}[call]
    counts = (to_all + extra[0], extra[1], out + extra[2], away + extra[3])
    return WireBytes(*(message * count for count in counts))
