"""What owner-sharded Muon is compared with, in the same harness: same kernels, same AdamW, same counting.

Every method takes a plain model, reduces in ``step``, updates, and leaves whole new weights on every rank. They are for
comparison: no accumulation, clipping, checkpoints or overlap. The other parameters take the same way in all of them.

* :class:`ReplicatedMuon`: gradients averaged everywhere, every rank updates everything (DDP and Muon).
* :class:`GatherMuon`: sharded state; directions are gathered, every rank orthogonalises everything (the paper's
  baseline, DMuon arXiv 2606.27153).
* :class:`AllToAllMuon`: sharded state; each rank is sent some whole matrices and sends their updates back (as in Dion's
  implementation of Muon, arXiv 2504.05295).
* :class:`ShardedAdamW`: AdamW for everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW

from dist_lib.comm import ExactReducer, Reducer, collectives
from dist_lib.dmuon.config import RuntimeConfig, check_model
from dist_lib.dmuon.events import EventLog
from dist_lib.dmuon.optimizer import MUON_KEYS
from dist_lib.dmuon.packing import lay, take
from dist_lib.dmuon.plan import matrix_specs
from dist_lib.dmuon.rest import ShardedRest
from dist_lib.ops import newton_schulz
from dist_lib.optim import Muon, ParameterSplit, split_parameters, update_scale
from dist_lib.optim.muon import apply_update, next_momentum


class Baseline(ABC):
    """Base of the methods.

    Args:
        model: the plain module, with equal weights on all ranks.
        lr, weight_decay: of both.
        betas, eps: of AdamW.
        split: which parameters are matrices.
        reducer: how gradients are averaged.
        group: ranks that take part.
        **muon: further options of :class:`~dist_lib.optim.Muon`, but ``split_sizes`` and ``flatten``.

    Raises:
        ValueError, TypeError: an option or a model that is not allowed.

    Attributes:
        histogram: how often this rank has orthogonalised each matrix.
        log: events.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        split: ParameterSplit | None = None,
        reducer: Reducer | None = None,
        group: dist.ProcessGroup | None = None,
        **muon: Any,
    ) -> None:
        check_model(model, sharded=False)
        if muon.get("split_sizes") or muon.get("flatten"):
            raise ValueError("the baselines take whole matrices only: leave out split_sizes and flatten")
        self.model, self.group = model, group
        self.reducer: Reducer = reducer or ExactReducer()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        split = split_parameters(model) if split is None else split
        self.matrices, others = self._route(dict(split.muon), dict(split.adamw))
        probe = Muon([Parameter(torch.zeros(1, 1))], lr, weight_decay=weight_decay, **muon).param_groups[0]
        self.options: dict[str, Any] = {k: probe[k] for k in MUON_KEYS}
        self.log = EventLog(self.rank, next(model.parameters()).device)
        self.rest = self._sharded(others, by_rows=False)
        self.adamw = AdamW(self.rest.shards.values(), lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.histogram: Counter[str] = Counter()

    def _route(
        self, matrices: dict[str, Parameter], others: dict[str, Parameter]
    ) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
        return matrices, others

    def _sharded(self, parameters: Mapping[str, Parameter], *, by_rows: bool) -> ShardedRest:
        return ShardedRest(
            parameters,
            RuntimeConfig(),
            self.reducer,
            self.log,
            rank=self.rank,
            world_size=self.world_size,
            group=self.group,
            by_rows=by_rows,
        )

    def set_lr(self, lr: float) -> None:
        """Learning rate of both."""
        self.options["lr"] = lr
        for group in self.adamw.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self) -> None:
        """Average, update, and leave whole new weights on every rank. Collective."""
        everything = {**self.matrices, **self.rest.parameters}
        flags = torch.tensor([p.grad is not None for p in everything.values()], dtype=torch.int32)
        flags = collectives.all_reduce(flags.to(self.log.device), op="max", group=self.group)
        used = {n for n, flag in zip(everything, flags.tolist(), strict=True) if flag}
        self._reduce_matrices(used)
        self.rest.reduce()
        self.rest.keep_used(used)
        self._update_matrices()
        if self.rest.shards:
            with self.log.span("adamw"):
                self.adamw.step()
        self._publish_matrices()
        self.rest.publish()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.rest.clear()
        for p in self.matrices.values():
            p.grad = None

    def total_histogram(self) -> dict[str, int]:
        """How often each matrix was orthogonalised over all ranks. Collective."""
        row = torch.tensor([self.histogram[n] for n in self.matrices], dtype=torch.int64, device=self.log.device)
        collectives.all_reduce(row, group=self.group)
        return dict(zip(self.matrices, row.tolist(), strict=True))

    def _orthogonalise(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scaled updates; equal shapes go through Newton-Schulz together."""
        shapes: dict[torch.Size, list[str]] = {}
        for name, direction in directions.items():
            shapes.setdefault(direction.shape, []).append(name)
        out = {}
        for shape, names in shapes.items():
            with self.log.span("orthogonalise", names[0]):
                stacked = torch.cat([directions[n].reshape(-1, *shape[-2:]) for n in names])
                steps, coefficients = self.options["ns_steps"], self.options["ns_coefficients"]
                result = newton_schulz(stacked, steps=steps, coefficients=coefficients)
                result = result * update_scale(self.options["scale"], *shape[-2:])
            self.histogram.update(names)
            parts = result.split([stacked.shape[0] // len(names)] * len(names))
            out.update({n: part.reshape(shape) for n, part in zip(names, parts, strict=True)})
        return out

    @abstractmethod
    def _reduce_matrices(self, used: set[str]) -> None: ...
    @abstractmethod
    def _update_matrices(self) -> None: ...
    @abstractmethod
    def _publish_matrices(self) -> None: ...


class ReplicatedMuon(Baseline):
    """Every rank averages all gradients and updates all matrices: ``R`` times the work, no state saved."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(model, lr, **options)
        groups = [{"params": list(self.matrices.items())}]
        self.muon = Muon(groups, nonfinite="propagate", **self.options) if self.matrices else None

    def _reduce_matrices(self, used: set[str]) -> None:
        if not self.matrices:
            return
        parameters = list(self.matrices.values())
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        start = self.log.mark()
        flat = self.reducer.all_reduce(lay(parts, parts[0].dtype), group=self.group)
        for (name, p), mean in zip(self.matrices.items(), take(flat, [p.shape for p in parameters]), strict=True):
            p.grad = mean.to(p.dtype) if name in used else None
        self.log.add("reduce", "", flat.nbytes, start)

    def _update_matrices(self) -> None:
        if self.muon is None:
            return
        for group in self.muon.param_groups:
            group["lr"] = self.options["lr"]
        with self.log.span("orthogonalise"):
            self.muon.step()
        self.histogram.update(n for n, p in self.matrices.items() if p.grad is not None)

    def _publish_matrices(self) -> None:
        """Every rank has computed the same weights."""


class GatherMuon(Baseline):
    """State in row shards; directions are gathered whole everywhere and every rank orthogonalises all of them."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(model, lr, **options)
        self.sharded = self._sharded(self.matrices, by_rows=True)
        self._momentum = {n: torch.zeros_like(s.detach()) for n, s in self.sharded.shards.items()}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        super().zero_grad()
        self.sharded.clear()

    def _reduce_matrices(self, used: set[str]) -> None:
        self.sharded.reduce()
        self.sharded.keep_used(used)

    def _directions(self) -> dict[str, Tensor]:
        """This rank's rows of what is to be orthogonalised, flat, for all matrices that any rank used."""
        out = {}
        options = {"momentum": self.options["momentum"], "form": self.options["momentum_form"]}
        for name, shard in self.sharded.shards.items():
            if shard.grad is not None:
                grad = shard.grad.neg() if self.options["maximize"] else shard.grad
                momentum = self._momentum[name]
                out[name] = next_momentum(momentum, grad, nesterov=self.options["nesterov"], **options)
        return out

    def _apply(self, name: str, update: Tensor) -> None:
        options = {"lr": self.options["lr"], "weight_decay": self.options["weight_decay"]}
        apply_update(self.sharded.shards[name], update, **options)

    def _update_matrices(self) -> None:
        directions = self._directions()
        for chunks in self.sharded.chunks:
            used = [n for n in chunks.names if n in directions]
            first = self.sharded.shards[chunks.names[0]]
            row = torch.zeros(chunks.width, dtype=first.dtype, device=first.device)
            for name, part in zip(chunks.names, chunks.mine(row, self.rank), strict=True):
                if name in directions:
                    part.copy_(directions[name])
            whole = [torch.empty(self.matrices[n].shape, dtype=row.dtype, device=row.device) for n in chunks.names]
            start = self.log.mark()
            chunks.join(collectives.all_gather(row, group=self.group), whole)
            self.log.add("materialise", "", row.nbytes, start)
            updates = self._orthogonalise({n: w for n, w in zip(chunks.names, whole, strict=True) if n in used})
            for index, name in enumerate(chunks.names):
                if name in updates:
                    a, b = chunks.bounds(index, self.rank)
                    self._apply(name, updates[name].reshape(-1)[a:b])

    def _publish_matrices(self) -> None:
        self.sharded.publish()


class AllToAllMuon(GatherMuon):
    """State in row shards; equal shapes are dealt out in turn, and each rank orthogonalises what it is dealt."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(model, lr, **options)
        turn: Counter[tuple[int, ...]] = Counter()
        self.owner: dict[str, int] = {}
        for spec in matrix_specs(self.matrices.items()) if self.matrices else ():
            self.owner[spec.name] = turn[spec.shape] % self.world_size
            turn[spec.shape] += 1

    def _update_matrices(self) -> None:
        directions = self._directions()
        for chunks in self.sharded.chunks:
            size = dict(zip(chunks.names, chunks.sizes, strict=True))
            dealt = [[n for n in chunks.names if self.owner[n] == r] for r in range(self.world_size)]
            dtype = self.sharded.shards[chunks.names[0]].dtype
            row = torch.zeros(chunks.width, dtype=dtype, device=self.log.device)
            padded = dict(zip(chunks.names, row.split(list(chunks.sizes)), strict=True))
            for name, direction in directions.items():
                if name in padded:
                    padded[name][: direction.numel()].copy_(direction)
            mine = sum(size[n] for n in dealt[self.rank])
            start = self.log.mark()
            sent = [torch.cat([row[:0], *(padded[n] for n in names)]) for names in dealt]
            rows = collectives.all_to_all(sent, [mine] * self.world_size, group=self.group)
            self.log.add("materialise", "", row.nbytes, start)
            answers = self._answer(rows, dealt[self.rank], size, directions)
            back = collectives.all_to_all(answers, [sum(size[n] for n in names) for names in dealt], group=self.group)
            for names, flat in zip(dealt, back, strict=True):
                for name, part in zip(names, flat.split([size[n] for n in names]), strict=True):
                    if name in directions:
                        self._apply(name, part[: self.sharded.shards[name].numel()])

    def _answer(
        self, rows: list[Tensor], names: list[str], size: Mapping[str, int], used: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Rows of the updates of this rank's matrices for each rank, padded."""
        stacked = torch.stack(rows)
        columns = dict(zip(names, stacked.split([size[n] for n in names], dim=1), strict=True)) if names else {}
        whole = {
            n: column.reshape(-1)[: self.matrices[n].numel()].reshape(self.matrices[n].shape)
            for n, column in columns.items()
            if n in used
        }
        updates = self._orthogonalise(whole)
        out = torch.zeros_like(stacked)
        for name, column in dict(zip(names, out.split([size[n] for n in names], dim=1), strict=True)).items():
            if name in updates:
                flat = torch.zeros(column.numel(), dtype=out.dtype, device=out.device)
                flat[: updates[name].numel()] = updates[name].reshape(-1)
                column.copy_(flat.view_as(column))
        return list(out)


class ShardedAdamW(Baseline):
    """AdamW for every parameter, state cut evenly over the ranks."""

    def _route(
        self, matrices: dict[str, Parameter], others: dict[str, Parameter]
    ) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
        return {}, {**matrices, **others}

    def _reduce_matrices(self, used: set[str]) -> None:
        """There are none."""

    def _update_matrices(self) -> None:
        """There are none."""

    def _publish_matrices(self) -> None:
        """There are none."""


BASELINES: Mapping[str, type[Baseline]] = {
    "replicated": ReplicatedMuon,
    "gather": GatherMuon,
    "all-to-all": AllToAllMuon,
    "adamw": ShardedAdamW,
}
