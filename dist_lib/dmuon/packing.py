"""Which matrices travel together, and how tensors are laid into one buffer and taken out again.

Matrices go by layer and owner: one message carries all that one rank owns of one layer. All other parameters are cut
into equal chunks, one a rank, and one message carries the chunks of all of them. Nothing is padded but the last chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_lib.dmuon.config import LayerOf, RuntimeConfig


@dataclass(frozen=True)
class Pack:
    """Matrices of one layer that one rank owns and that have equal data types.

    Attributes:
        owner: rank within the data-parallel group.
        names: in the model's order.
        numels: elements of each.
        dtype: of the weights when they are published.
        reduce_dtype: of the gradients when they are reduced.
    """

    owner: int
    names: tuple[str, ...]
    numels: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(self.numels)

    @property
    def publish_bytes(self) -> int:
        """Bytes of one message with the weights."""
        return self.numel * self.dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of one message with the gradients, before a reducer converts them."""
        return self.numel * self.reduce_dtype.itemsize


@dataclass(frozen=True)
class LayerGroup:
    """All matrices of one layer, as packs in the order of their owners."""

    layer: str
    packs: tuple[Pack, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all packs."""
        return tuple(name for pack in self.packs for name in pack.names)

    @property
    def publish_bytes(self) -> int:
        """Bytes of all messages with weights."""
        return sum(pack.publish_bytes for pack in self.packs)


def make_groups(
    matrices: Mapping[str, Tensor], owners: Mapping[str, int], layer_of: LayerOf, config: RuntimeConfig
) -> tuple[LayerGroup, ...]:
    """Sort matrices into layers (in the model's order) and packs (in the order of owners).

    Args:
        matrices: name and parameter, in the model's order, with the data type that is published.
        owners: owner of each name.
        layer_of: layer of a name.
        config: for the data types of gradients, and whether to pack.
    """
    layers: dict[str, dict[tuple[int, str, str, str], list[str]]] = {}
    for name, p in matrices.items():
        reduce_dtype = config.reduce_dtype(name, p.dtype)
        key = (owners[name], str(p.dtype), str(reduce_dtype), "" if config.packed else name)
        layers.setdefault(layer_of(name), {}).setdefault(key, []).append(name)
    groups = []
    for layer, by_key in layers.items():
        packs = []
        for key in sorted(by_key, key=lambda k: k[0]):  # stable: within an owner in the model's order
            names = by_key[key]
            first = matrices[names[0]]
            packs.append(
                Pack(
                    owner=owners[names[0]],
                    names=tuple(names),
                    numels=tuple(matrices[n].numel() for n in names),
                    dtype=first.dtype,
                    reduce_dtype=config.reduce_dtype(names[0], first.dtype),
                )
            )
        groups.append(LayerGroup(layer, tuple(packs)))
    return tuple(groups)


def lay(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One new contiguous 1-D buffer with all elements in ``dtype``; never shares memory with an input."""
    out = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    for part, t in zip(out.split([t.numel() for t in tensors]), tensors, strict=True):
        part.copy_(t.detach().reshape(-1))
    return out


def take(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the tensors that :func:`lay` laid into ``flat``."""
    sizes = [torch.Size(s).numel() for s in shapes]
    return [part.view(*s) for part, s in zip(flat.split(sizes), shapes, strict=True)]


@dataclass(frozen=True)
class Chunks:
    """Tensors of one data type cut into one chunk a rank: chunk r of n elements is ``[r c, (r+1) c)``.

    With units of u elements that stay together, ``c = ceil(n / u / R) u``.

    Attributes:
        names: of the tensors.
        numels: elements of each.
        world_size: R.
        units: u of each, such as the length of a row; empty: 1 for all.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    world_size: int
    units: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """c of each tensor, padding included."""
        units = self.units or (1,) * len(self.numels)
        return tuple(-(-n // u // self.world_size) * u for n, u in zip(self.numels, units, strict=True))

    @property
    def width(self) -> int:
        """Elements a rank holds of all tensors, padding included."""
        return sum(self.sizes)

    def bounds(self, index: int, rank: int) -> tuple[int, int]:
        """First and past-the-last element of tensor ``index`` on ``rank``; equal if that rank holds none."""
        n, c = self.numels[index], self.sizes[index]
        return min(rank * c, n), min((rank + 1) * c, n)

    def cut(self, tensors: Sequence[Tensor | None], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """All chunks: (R, width), row r for rank r; None counts as zeros."""
        out = torch.zeros(self.world_size, self.width, dtype=dtype, device=device)
        for column, t, c in zip(out.split(list(self.sizes), dim=1), tensors, self.sizes, strict=True):
            if t is not None and c:
                flat = t.detach().reshape(-1)
                rows = flat.numel() // c
                column[:rows].copy_(flat[: rows * c].view(rows, c))
                if rows < self.world_size:
                    column[rows, : flat.numel() - rows * c].copy_(flat[rows * c :])
        return out

    def mine(self, row: Tensor, rank: int) -> list[Tensor]:
        """This rank's part of each tensor without padding, as views of its row (width)."""
        parts = row.split(list(self.sizes))
        return [p[: b - a] for p, (a, b) in zip(parts, (self.bounds(i, rank) for i in range(len(parts))), strict=True)]

    def join(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the rows of all ranks (R, width) back into the tensors, in place."""
        for column, t in zip(rows.split(list(self.sizes), dim=1), tensors, strict=True):
            if t.numel():
                t.copy_(column.reshape(-1)[: t.numel()].view(t.shape))
