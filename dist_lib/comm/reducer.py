"""The seam through which gradients are reduced.

Runtimes take a :class:`Reducer`; the default is exact. A package that sends gradients in 8 bits supplies another one
with the same three methods, and no runtime has to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from dist_lib.comm import collectives


@runtime_checkable
class Reducer(Protocol):
    """How a gradient tensor becomes its mean (or sum) over the ranks of a group."""

    def all_reduce(self, tensor: Tensor, *, average: bool = True, group: dist.ProcessGroup | None = None) -> Tensor:
        """Reduce in place on every rank; return ``tensor``."""
        ...

    def reduce_to_owner(
        self, tensor: Tensor, owner: int, *, average: bool = True, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Reduce in place on global rank ``owner`` only; elsewhere ``tensor`` keeps its value."""
        ...

    def reduce_scatter(self, tensor: Tensor, *, average: bool = True, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return this rank's slice of the reduced tensor along dimension 0."""
        ...


@dataclass(frozen=True)
class ExactReducer:
    """Full-precision reduction.

    Attributes:
        ordered: add in rank order, so that the bits are those of a single process that adds the same terms in the
            same order; costs world times the bytes of the input (a gather). Without it the backend chooses the order.
    """

    ordered: bool = False

    def _scale(self, tensor: Tensor, average: bool, group: dist.ProcessGroup | None) -> Tensor:
        return tensor.div_(collectives.world(group)) if average else tensor

    def all_reduce(self, tensor: Tensor, *, average: bool = True, group: dist.ProcessGroup | None = None) -> Tensor:
        """Reduce in place on every rank; return ``tensor``. Any strides; half types are summed in float32."""
        if self.ordered:
            tensor.copy_(collectives.ordered_sum(tensor, group=group))
        else:
            collectives.all_reduce(tensor, group=group)
        return self._scale(tensor, average, group)

    def reduce_to_owner(
        self, tensor: Tensor, owner: int, *, average: bool = True, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Reduce in place on global rank ``owner`` only; elsewhere ``tensor`` keeps its value."""
        mine = dist.get_rank() == owner
        if self.ordered:
            total = collectives.ordered_sum(tensor, group=group)
            if mine:
                tensor.copy_(total)
        else:
            collectives.reduce(tensor, owner, group=group)
        return self._scale(tensor, average, group) if mine else tensor

    def reduce_scatter(self, tensor: Tensor, *, average: bool = True, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return this rank's slice of the reduced tensor along dimension 0, which the world size must divide."""
        if self.ordered:
            size = collectives.world(group)
            if tensor.shape[0] % size:
                raise ValueError(f"shape {tuple(tensor.shape)} cannot be cut into {size} equal parts: pad it")
            part = collectives.ordered_sum(tensor, group=group).chunk(size)[dist.get_rank(group)].clone()
        else:
            part = collectives.reduce_scatter(tensor, group=group)
        return self._scale(part, average, group)
