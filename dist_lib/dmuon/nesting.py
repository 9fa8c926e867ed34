"""Nested owners: which data-parallel row and tensor-parallel column update a matrix that is cut, and how.

Pure data, made on every rank from names, shapes and placements alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dist_lib.dmuon.plan import OwnerPlan, make_plan
from dist_lib.ops.newton_schulz import DEFAULT_RESTARTS

WAYS = ("auto", "gather", "gram")


@dataclass(frozen=True)
class Nested:
    """Where one matrix is updated, and how.

    Attributes:
        name: of the parameter.
        shape: of the whole matrix.
        dim: dimension that is cut into parts; None if every tensor-parallel rank holds all of it.
        row: data-parallel index of its owner.
        column: tensor-parallel index of its owner.
        way: ``"gather"`` or ``"gram"``.
    """

    name: str
    shape: tuple[int, int]
    dim: int | None
    row: int
    column: int
    way: str

    def sizes(self, ranks: int) -> list[int]:
        """Rows or columns of each tensor-parallel rank's part, equal pieces with the last ones short."""
        whole = self.shape[self.dim or 0]
        if self.dim is None:
            return [whole] * ranks
        piece = -(-whole // ranks)
        return [max(0, min(piece, whole - r * piece)) for r in range(ranks)]

    def part_shape(self, rank: int, ranks: int) -> tuple[int, int]:
        """Shape of a rank's part."""
        rows, cols = self.shape
        size = self.sizes(ranks)[rank]
        return (size, cols) if self.dim == 0 else (rows, size) if self.dim == 1 else (rows, cols)


def choose_way(shape: tuple[int, int], dim: int | None, *, restarts: int = len(DEFAULT_RESTARTS)) -> str:
    """The way with fewer elements on the busiest link: the Gram way if its matrices are smaller than the matrix itself.

    With m the short and n the long dimension, the owner of the gathering way receives and sends nearly ``m n`` elements
    each; the Gram way's all-reduces send and receive nearly ``2 m^2`` for the start and for each restart.

    Args:
        shape: of the whole matrix.
        dim: that is cut; None for none, which needs no exchange at all.
        restarts: of the Gram form.
    """
    short, long = min(shape), max(shape)
    cut_long = dim is not None and shape[dim] == long
    return "gram" if cut_long and (1 + restarts) * short < long else "gather"


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nest(matrices: Mapping[str, Tensor], plan: OwnerPlan, ranks: int, way: str) -> dict[str, Nested]:
    """Decide for every matrix.

    Args:
        matrices: parameters by name, of whole shape; DTensors where they are cut.
        plan: owners among data-parallel rows.
        ranks: tensor-parallel ranks of a row.
        way: one of :data:`WAYS`; ``"gram"`` holds where the long dimension is cut.
    """
    columns: dict[str, int] = {}
    for row in range(plan.world_size):
        bucket = [(n, tuple(p.shape)) for n, p in matrices.items() if plan.owner(n) == row]
        inner = make_plan(bucket, ranks) if bucket else None
        # The dearest matrix of each bucket would go to column 0 in every row: turn the columns with the row.
        columns |= {n: (inner.owner(n) + row) % ranks for n, _ in bucket if inner is not None}
    found = {}
    for name, p in matrices.items():
        rows, cols = (int(n) for n in p.shape)
        placement = p.placements[0] if isinstance(p, DTensor) else None
        dim = placement.dim % 2 if isinstance(placement, Shard) else None
        possible = dim is not None and (rows, cols)[dim] == max(rows, cols)
        chosen = choose_way((rows, cols), dim) if way == "auto" else way if possible else "gather"
        found[name] = Nested(name, (rows, cols), dim, plan.owner(name), columns[name], chosen)
    return found
