"""The parameters that are no matrices: cut evenly over the ranks, updated by AdamW, gathered again.

Every tensor is cut into one chunk a rank. A rank holds state (and for half types a float32 copy) for its chunks alone.
AdamW works element by element, so the bits do not depend on where the cuts are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dist_lib.comm import Reducer, collectives
from dist_lib.dmuon.config import RuntimeConfig
from dist_lib.dmuon.events import EventLog
from dist_lib.dmuon.packing import Chunks

HALF = (torch.float16, torch.bfloat16)


class ShardedRest:
    """Chunks of parameters, their gradients and their way back.

    Args:
        parameters: by name, whole on every rank.
        config: data types.
        reducer: how gradients are reduced.
        log: for events.
        rank: of this process in ``group``.
        world_size: of ``group``.
        group: ranks that share the work.
        by_rows: cut between rows, as FSDP2 does, and not anywhere.

    Attributes:
        shards: this rank's chunk of each parameter, 1-D, what the optimizer updates.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        config: RuntimeConfig,
        reducer: Reducer,
        log: EventLog,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        by_rows: bool = False,
    ) -> None:
        self.parameters, self._reducer, self._log = dict(parameters), reducer, log
        self.rank, self.world_size, self._group = rank, world_size, group
        kinds: dict[tuple[str, str], list[str]] = {}
        self._reduce_dtype = {n: config.reduce_dtype(n, p.dtype) for n, p in self.parameters.items()}
        for name, p in self.parameters.items():
            kinds.setdefault((str(p.dtype), str(self._reduce_dtype[name])), []).append(name)
        self.chunks = tuple(
            Chunks(
                tuple(names),
                tuple(self.parameters[n].numel() for n in names),
                world_size,
                tuple(max(1, self.parameters[n][0].numel()) for n in names) if by_rows else (),
            )
            for _, names in sorted(kinds.items())
        )
        self.shards: dict[str, Parameter] = {}
        for chunks in self.chunks:
            for i, name in enumerate(chunks.names):
                p, (a, b) = self.parameters[name], chunks.bounds(i, rank)
                dtype = torch.float32 if p.dtype in HALF and config.master else p.dtype
                self.shards[name] = Parameter(p.detach().reshape(-1)[a:b].to(dtype, copy=True))

    @torch.no_grad()
    def reduce(self) -> None:
        """Average all gradients, add this rank's chunk to ``shards[name].grad`` and drop the whole ones. Collective."""
        for chunks in self.chunks:
            parameters = [self.parameters[n] for n in chunks.names]
            dtype = self._reduce_dtype[chunks.names[0]]
            start = self._log.mark()
            rows = chunks.cut([p.grad for p in parameters], dtype=dtype, device=parameters[0].device)
            row = self._reducer.reduce_scatter(rows, group=self._group)[0]
            for name, p, part in zip(chunks.names, parameters, chunks.mine(row, self.rank), strict=True):
                p.grad = None
                shard = self.shards[name]
                part = part.to(shard.dtype)
                shard.grad = part.clone() if shard.grad is None else shard.grad.add_(part)
            self._log.add("reduce", "rest", rows.nbytes, start)

    def keep_used(self, used: set[str]) -> None:
        """Drop the (zero) gradients of parameters that no rank used."""
        for name, shard in self.shards.items():
            if name not in used:
                shard.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the chunks of all ranks into the whole parameters. Collective."""
        for chunks in self.chunks:
            parameters = [self.parameters[n] for n in chunks.names]
            row = torch.zeros(chunks.width, dtype=parameters[0].dtype, device=parameters[0].device)
            start = self._log.mark()
            for name, part in zip(chunks.names, chunks.mine(row, self.rank), strict=True):
                part.copy_(self.shards[name])
            chunks.join(collectives.all_gather(row, group=self._group), parameters)
            self._log.add("publish", "rest", row.nbytes, start)

    @torch.no_grad()
    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Take this rank's chunks from whole tensors."""
        for chunks in self.chunks:
            for i, name in enumerate(chunks.names):
                a, b = chunks.bounds(i, self.rank)
                self.shards[name].copy_(values[name].detach().reshape(-1)[a:b])

    def gradients(self) -> list[Tensor]:
        """This rank's chunks of all averaged gradients."""
        return [s.grad for s in self.shards.values() if s.grad is not None]

    def square_sum(self) -> Tensor:
        """Sum of squares of :meth:`gradients`, float64."""
        parts = [g.double().square().sum() for g in self.gradients()]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    def clear(self) -> None:
        """Forget all gradients."""
        for name, shard in self.shards.items():
            shard.grad = None
            self.parameters[name].grad = None


class WholeRest:
    """Parameters that another system (FSDP2) shards, reduces and gathers: the optimizer updates them as they are.

    Args:
        parameters: by name; DTensors.
        replicas: how many ranks hold the same shard.
    """

    def __init__(self, parameters: Mapping[str, Parameter], *, replicas: int) -> None:
        self.parameters = self.shards = dict(parameters)
        self._replicas = replicas

    def reduce(self) -> None:
        """The other system has done it."""

    def publish(self) -> None:
        """The other system gathers before it computes."""

    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """The shards are the parameters themselves: whoever set those has set these."""

    def keep_used(self, used: set[str]) -> None:
        """The other system leaves unused parameters without a gradient."""

    def gradients(self) -> list[Tensor]:
        """This rank's shards of all averaged gradients."""
        found = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [g.to_local() if hasattr(g, "to_local") else g for g in found]

    def square_sum(self) -> Tensor:
        """Sum of squares of :meth:`gradients`, float64, so that the sum over all ranks counts each element once."""
        parts = [g.double().square().sum() for g in self.gradients()]
        return torch.stack(parts).sum() / self._replicas if parts else torch.zeros((), dtype=torch.float64)

    def clear(self) -> None:
        """Forget all gradients."""
        for p in self.parameters.values():
            p.grad = None


Rest = ShardedRest | WholeRest
