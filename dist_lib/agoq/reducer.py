"""Gradients reduced through 8 bits, for every runtime that takes a :class:`~dist_lib.comm.Reducer`.

Small tensors are reduced exactly: below some tens of thousands of numbers the message is not what takes time (AGoQ,
Table 4, gains nothing at 2^15). With error feedback what rounding lost is kept, by the parameter's name, and sent the
next time; what is kept belongs in the checkpoint, of every rank its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dist_lib.agoq import collectives
from dist_lib.agoq.buckets import Bucket
from dist_lib.agoq.wire import GradientFormat, Hops, Ranks
from dist_lib.comm import ExactReducer, agree


def _place() -> tuple[int, int]:
    """(rank, number of ranks) of this process; of one alone without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class QuantizedReducer:
    """Means or sums over ranks through 8-bit messages; a :class:`~dist_lib.comm.Reducer`.

    Args:
        form: how gradients are sent; default ``int8`` in blocks of 256.
        min_elements: tensors of fewer elements are reduced exactly, in full precision.
        feedback: keep what rounding loses and send it the next time: 4 bytes an element. Calls then need ``key``.
        nodes: a mesh of two dimensions, (nodes, ranks of a node), over all ranks in order: reductions over all ranks
            go in two hops.
        seed: of stochastic rounding; every rank draws its own numbers from it.

    Raises:
        ValueError: a negative threshold, or a mesh of other ranks.
    """

    def __init__(
        self,
        form: GradientFormat | None = None,
        *,
        min_elements: int = 65_536,
        feedback: bool = False,
        nodes: DeviceMesh | None = None,
        seed: int = 0,
    ) -> None:
        if min_elements < 0:
            raise ValueError(f"min_elements is {min_elements}; need 0 (never exact) or more")
        if nodes is not None and (nodes.ndim != 2 or nodes.mesh.flatten().tolist() != list(range(nodes.size()))):
            raise ValueError(f"nodes is a mesh over {nodes.mesh.tolist()}; need two dimensions over all ranks in order")
        self.form, self.min_elements, self.feedback = form or GradientFormat(), min_elements, feedback
        self._nodes, self._seed = nodes, seed
        self._exact = ExactReducer()
        self._residuals: dict[str, Tensor] = {}
        self._random: torch.Generator | None = None

    # ---- what every call needs ------------------------------------------------------------------------------------

    def agree(self, group: dist.ProcessGroup | None = None) -> None:
        """Raise on every rank unless all ranks were given the same settings. Collective.

        Raises:
            AgreementError: naming the ranks that differ.
        """
        nodes = None if self._nodes is None else self._nodes.mesh.tolist()
        agree([self.form, self.min_elements, self.feedback, nodes, self._seed], what="the 8-bit reducer", group=group)

    def is_exact(self, numel: int) -> bool:
        """Whether a tensor of ``numel`` elements is reduced in full precision."""
        return numel < self.min_elements

    def _ranks(self, group: dist.ProcessGroup | None) -> Ranks:
        if self._nodes is None:
            return group
        if group is not None and dist.get_world_size(group) != self._nodes.size():
            raise ValueError(
                f"a group of {dist.get_world_size(group)} ranks, but the mesh of nodes has {self._nodes.size()}: "
                "use another reducer, without nodes, for parts of the ranks"
            )
        return self._nodes

    def hops(self, group: dist.ProcessGroup | None = None) -> Hops:
        """How messages travel among the ranks of ``group`` (default: all)."""
        return Hops(self._ranks(group))

    @property
    def generator(self) -> torch.Generator | None:
        """Where this rank's stochastic rounding draws from; None for nearest rounding."""
        if self.form.rounding == "nearest":
            return None
        if self._random is None:
            self._random = torch.Generator().manual_seed(self._seed * 1_000_003 + _place()[0])
        return self._random

    def _residual(self, key: str | None, tensor: Tensor) -> Tensor | None:
        if not self.feedback:
            return None
        if key is None:
            raise ValueError(
                "with error feedback every call needs key=, the parameter's name: that is how what was lost is found "
                "again; runtimes that give no name take a reducer without feedback"
            )
        known = self._residuals.get(key)
        if known is None:
            known = self._residuals[key] = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        if known.shape != tensor.shape:
            raise ValueError(
                f"{key!r} has shape {tuple(tensor.shape)}, what is kept of it {tuple(known.shape)}: give each tensor a "
                "key of its own, and call reset() if the model has changed"
            )
        if known.device != tensor.device:  # loaded from a checkpoint
            known = self._residuals[key] = known.to(tensor.device)
        return known

    # ---- the three calls ------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, *, average: bool = True, group: dist.ProcessGroup | None = None, key: str | None = None
    ) -> Tensor:
        """Reduce in place on every rank, to the same bits; return ``tensor``.

        Args:
            tensor: any shape, strides; float32, float16, bfloat16, float64.
            average: mean or sum.
            group: default: all ranks.
            key: the parameter's name; needed with error feedback.

        Raises:
            TypeError: a dtype that is not allowed.
            ValueError: no key with error feedback, or a key of another shape.
        """
        collectives.check_gradient(tensor)
        if self.is_exact(tensor.numel()):
            return self._exact.all_reduce(tensor, average=average, group=group)
        return collectives.all_reduce(
            tensor,
            op="mean" if average else "sum",
            form=self.form,
            group=self._ranks(group),
            residual=self._residual(key, tensor),
            generator=self.generator,
        )

    def reduce_to_owner(
        self,
        tensor: Tensor,
        owner: int,
        *,
        average: bool = True,
        group: dist.ProcessGroup | None = None,
        key: str | None = None,
    ) -> Tensor:
        """Reduce in place on global rank ``owner`` only; elsewhere it keeps its value. See :meth:`all_reduce`."""
        collectives.check_gradient(tensor)
        if self.is_exact(tensor.numel()):
            return self._exact.reduce_to_owner(tensor, owner, average=average, group=group)
        return collectives.reduce(
            tensor,
            owner,
            op="mean" if average else "sum",
            form=self.form,
            group=self._ranks(group),
            residual=self._residual(key, tensor),
            generator=self.generator,
        )

    def reduce_scatter(
        self, tensor: Tensor, *, average: bool = True, group: dist.ProcessGroup | None = None, key: str | None = None
    ) -> Tensor:
        """Return this rank's slice along dimension 0, which the number of ranks must divide. See :meth:`all_reduce`."""
        collectives.check_gradient(tensor)
        if self.is_exact(tensor.numel()):
            return self._exact.reduce_scatter(tensor, average=average, group=group)
        return collectives.reduce_scatter(
            tensor,
            op="mean" if average else "sum",
            form=self.form,
            group=self._ranks(group),
            residual=self._residual(key, tensor),
            generator=self.generator,
        )

    @torch.no_grad()
    def all_reduce_named(
        self, tensors: Mapping[str, Tensor], *, average: bool = True, group: dist.ProcessGroup | None = None
    ) -> None:
        """Reduce several tensors in place in as few messages as one: small ones exactly, together; no block spans two.

        Args:
            tensors: by parameter name, in the same order on all ranks, on one device.
            average: mean or sum.
            group: default: all ranks.
        """
        for tensor in tensors.values():
            collectives.check_gradient(tensor)
        small = [t for t in tensors.values() if self.is_exact(t.numel()) and t.numel()]
        if small:
            flat = torch.cat([t.reshape(-1).float() for t in small])
            self._exact.all_reduce(flat, average=average, group=group)
            for tensor, part in zip(small, flat.split([t.numel() for t in small]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        large = {n: t for n, t in tensors.items() if not self.is_exact(t.numel()) and t.numel()}
        hops = self.hops(group)
        if large and hops.size > 1:
            self._reduce_bucket(large, hops, hops.size if average else 1)

    def _reduce_bucket(self, tensors: dict[str, Tensor], hops: Hops, divisor: int) -> None:
        device = next(iter(tensors.values())).device
        bucket = Bucket({n: t.shape for n, t in tensors.items()}, self.form, hops.size, device)
        lost = torch.zeros(hops.size, bucket.length, device=device) if self.feedback else None
        for name, tensor in tensors.items():
            residual = self._residual(name, tensor)
            wanted = tensor if residual is None else tensor + residual
            bucket.put(name, wanted, self.generator)
            if lost is not None:
                difference = wanted.float() - bucket.view(name).dequantize()
                lost.view(-1)[bucket.span(name)] = difference.reshape(-1)
        own = collectives.sum_and_encode(bucket.shards, hops, divisor, lost, self.generator)
        bucket.take(hops.gather(own))
        for name, tensor in tensors.items():
            tensor.copy_(bucket.view(name).dequantize())
            if lost is not None:
                part = lost.view(-1)[bucket.span(name)].view(tensor.shape)
                self._residuals[name].copy_(torch.where(part.isfinite(), part, 0.0))

    # ---- what is kept ---------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of what error feedback keeps."""
        return sum(t.nbytes for t in self._residuals.values())

    def reset(self) -> None:
        """Forget what was lost."""
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps, for its checkpoint; tensors, numbers and strings only."""
        return {
            "rank": _place()[0],
            "world_size": _place()[1],
            "residuals": {key: t.clone() for key, t in self._residuals.items()},
            "generator": None if self.generator is None else self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: it is of another rank or another number of ranks, or holds what this reducer would not use.
        """
        mine, theirs = _place(), (state["rank"], state["world_size"])
        if mine != theirs:
            raise ValueError(
                f"the state is of rank {theirs[0]} of {theirs[1]}, this is rank {mine[0]} of {mine[1]}: what a rank "
                "lost is its own; on another number of ranks start without it"
            )
        if state["residuals"] and not self.feedback:
            raise ValueError("the state holds what error feedback kept: make the reducer with feedback=True")
        if (state["generator"] is None) != (self.form.rounding == "nearest"):
            raise ValueError(f"the state was saved with another rounding than this reducer's {self.form.rounding!r}")
        self._residuals = {key: t.clone() for key, t in state["residuals"].items()}
        if self.generator is not None:
            self.generator.set_state(state["generator"])
