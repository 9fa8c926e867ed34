"""Muon for matrices that tensor parallelism cuts: nested owners, or a Gram matrix that all parts add up.

On a mesh of (data parallel, tensor parallel) ranks a matrix has an owner along each dimension. Gradients of its parts
are averaged to the owner's *row*, the ranks with that data-parallel index. Within the row one of two ways leads to the
update. *Gather*: the tensor-parallel owner alone holds the momentum, receives the parts, orthogonalises the whole
matrix and sends parts of the update back. *Gram*: each rank keeps the momentum of its own part, and the row adds up
small Gram matrices only (:func:`~dist_lib.ops.newton_schulz_sharded`); that needs the long dimension to be the one that
is cut. Then each rank of the row sends its new part to those with the same part. After DMuon (arXiv 2606.27153),
section on tensor parallelism; leaving out the gather in the Gram way is our derivation.

It is an optimizer over parameters that ``parallelize_module`` made, not a runtime with hooks: gradients move in
``step``, after backward. Float32 parameters on a two-dimensional mesh; everything else is refused at the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from dist_lib.comm import ExactReducer, Reducer, agree, collectives
from dist_lib.dmuon.nesting import WAYS, Nested, local, nest
from dist_lib.dmuon.plan import make_plan
from dist_lib.ops import newton_schulz, newton_schulz_sharded
from dist_lib.ops.newton_schulz import DEFAULT_RESTARTS
from dist_lib.optim import split_parameters
from dist_lib.optim.muon import apply_update, next_momentum
from dist_lib.optim.scales import update_scale


class TensorParallelDMuon(Optimizer):
    """DMuon over tensor-parallel parameters.

    Args:
        model: after ``parallelize_module`` on ``mesh["tp"]``-like submesh; equal on all data-parallel ranks.
        mesh: two named dimensions.
        lr: learning rate of both optimizers.
        data, tensor: names of the mesh's dimensions.
        way: ``"gather"``, ``"gram"`` where possible, or ``"auto"``: see :func:`~dist_lib.dmuon.nesting.choose_way`.
        adamw_lr: of AdamW for everything that is not a matrix, if another.
        weight_decay: of both, decoupled.
        momentum, nesterov: of Muon, heavy-ball form.
        betas, eps: of AdamW.
        ns_steps, ns_coefficients: of Newton-Schulz.
        nonfinite: ``"raise"``, ``"skip"`` or ``"propagate"``, as in :class:`~dist_lib.dmuon.DMuon`.
        reducer: how gradients are averaged over data-parallel ranks.

    Raises:
        ValueError, TypeError: a mesh, a placement, a type or an option that is not supported; nothing was changed.
        AgreementError: on every rank if models, plans or options differ.

    Attributes:
        nested: where each matrix is updated, by name, in the model's order.
        histogram: how often this rank, as owner, has had a matrix orthogonalised.
        skipped_steps: steps left out because of ``nonfinite="skip"``.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        lr: float = 1e-3,
        *,
        data: str = "dp",
        tensor: str = "tp",
        way: str = "auto",
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
        ns_coefficients: Any = "polar_express",
        nonfinite: str = "raise",
        reducer: Reducer | None = None,
    ) -> None:
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"the mesh has {mesh.size()} ranks, the world {dist.get_world_size()}; need all of them")
        if mesh.mesh_dim_names is None or set(mesh.mesh_dim_names) != {data, tensor}:
            raise ValueError(f"the mesh has dimensions {mesh.mesh_dim_names}; need {data!r} and {tensor!r}, no others")
        for option, given, allowed in (
            ("way", way, WAYS),
            ("nonfinite", nonfinite, ("raise", "skip", "propagate")),
        ):
            if given not in allowed:
                raise ValueError(f"{option} = {given!r}; it must be one of {', '.join(allowed)}")
        self.data_group, self.tensor_group = mesh.get_group(data), mesh.get_group(tensor)
        self.data_ranks = dist.get_process_group_ranks(self.data_group)
        self.tensor_ranks = dist.get_process_group_ranks(self.tensor_group)
        self.row, self.column = mesh.get_local_rank(data), mesh.get_local_rank(tensor)
        self.nonfinite, self.reducer, self.skipped_steps = nonfinite, reducer or ExactReducer(), 0
        split = split_parameters(model)
        self.matrices, self.rest = dict(split.muon), dict(split.adamw)
        for name, p in {**self.matrices, **self.rest}.items():
            self._check(name, p)
        self.plan = make_plan([(n, tuple(p.shape)) for n, p in self.matrices.items()], len(self.data_ranks))
        self.nested = nest(self.matrices, self.plan, len(self.tensor_ranks), way)
        options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "ns_coefficients": ns_coefficients}
        shared = {"lr": lr, "weight_decay": weight_decay}
        groups = [{"params": [*self.matrices.values()], "name": "muon", **shared, **options}] if self.matrices else []
        if self.rest:
            adamw = {"lr": lr if adamw_lr is None else adamw_lr, "betas": betas, "eps": eps}
            groups.append({"params": [*self.rest.values()], "name": "adamw", **shared, **adamw})
        plain = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        agree([plain, [*self.nested.values()], sorted(self.rest), nonfinite], what="the nested owners and options")
        first = [local(p.detach()) for p in (*self.matrices.values(), *self.rest.values())]
        agree(first, what="the first weights of ranks that hold the same parts", group=self.data_group)
        super().__init__(groups, {})
        self._parts = {n: Parameter(local(p.detach())) for n, p in self.rest.items()}  # share memory with the model
        self._adamw = AdamW([*self._parts.values()], betas=betas, eps=eps) if self._parts else None
        self.histogram: Counter[str] = Counter()
        self._reduced: dict[str, Tensor] | None = None
        self._used: list[str] = []

    def _check(self, name: str, p: Tensor) -> None:
        if p.dtype != torch.float32:
            raise TypeError(f"{name} is {p.dtype}; tensor-parallel parameters must be float32 here")
        if not isinstance(p, DTensor):
            return
        placements = p.placements
        if p.device_mesh.ndim != 1 or p.device_mesh.mesh.tolist() != self.tensor_ranks:
            raise ValueError(f"{name} lies on another mesh than the tensor-parallel one, ranks {self.tensor_ranks}")
        if not (placements[0].is_shard() or placements[0].is_replicate()):
            raise ValueError(f"{name} has placement {placements[0]}; need Shard or Replicate")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that were averaged for clipping and not used."""
        super().zero_grad(set_to_none)
        self._reduced = None

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average gradients over data-parallel ranks: matrices to their rows, all others everywhere. Collective."""
        names = [*self.matrices, *self.rest]
        known = {**self.matrices, **self.rest}
        used = torch.tensor([int(known[n].grad is not None) for n in names], device=self._device)
        anywhere = dict(zip(names, collectives.all_reduce(used).tolist(), strict=True))
        reduced: dict[str, Tensor] = {}
        for name in names:
            if not anywhere[name]:
                continue
            grad = known[name].grad
            if isinstance(grad, DTensor):
                grad = grad.redistribute(grad.device_mesh, known[name].placements)  # type: ignore[attr-defined]
            flat = (
                torch.zeros_like(local(known[name]))
                if grad is None
                else local(grad).clone(memory_format=torch.contiguous_format)
            )
            if name in self.rest:
                reduced[name] = self.reducer.all_reduce(flat, group=self.data_group)
            else:
                owner = self.data_ranks[self.nested[name].row]
                flat = self.reducer.reduce_to_owner(flat, owner, group=self.data_group)
                if self.nested[name].row == self.row:
                    reduced[name] = flat
        self._reduced, self._used = reduced, [n for n in names if anywhere[n]]

    @property
    def _device(self) -> torch.device:
        return next(local(p).device for p in (*self.matrices.values(), *self.rest.values()))

    def _counts_here(self, name: str) -> bool:
        """Whether this rank's part of a gradient is nobody else's: it counts once in a norm."""
        p = {**self.matrices, **self.rest}[name]
        cut = isinstance(p, DTensor) and p.placements[0].is_shard()
        return (cut or self.column == 0) and (name in self.matrices or self.row == 0)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all averaged gradients so that their global L2 norm is at most ``max_norm``; the norm before.

        Collective; between backward and ``step``. The norm is that of the whole model on one process.

        Raises:
            ValueError: a ``max_norm`` that is not positive.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm = {max_norm}; it must be above 0 (float('inf') only measures)")
        if self._reduced is None:
            self.reduce_gradients()
        assert self._reduced is not None
        squares = [g.double().square().sum() for n, g in self._reduced.items() if self._counts_here(n)]
        norm = collectives.all_reduce(sum(squares, torch.zeros((), dtype=torch.float64, device=self._device))).sqrt()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in self._reduced.values():
            gradient.mul_(coefficient.to(gradient.dtype))
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; every rank of the mesh calls it.

        Raises:
            FloatingPointError: on every rank, with ``nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reduced is None:
            self.reduce_gradients()
        assert self._reduced is not None
        gradients, self._reduced = self._reduced, None
        if self._may_step(gradients):
            for group in self.param_groups:
                if group["name"] == "muon":
                    self._step_matrices(group, gradients)
                else:
                    self._step_rest(group, gradients)
        return loss

    def _may_step(self, gradients: Mapping[str, Tensor]) -> bool:
        if self.nonfinite == "propagate":
            return True
        bad = [n for n, g in gradients.items() if not bool(torch.isfinite(g).all())]
        if not int(collectives.all_reduce(torch.tensor(len(bad), device=self._device))):
            return True
        if self.nonfinite == "raise":
            raise FloatingPointError(
                f"gradients hold NaN or infinity (on this rank: {bad[:3] or 'none'}); nothing was changed. Use "
                f"nonfinite='skip' to leave such steps out on all ranks"
            )
        self.skipped_steps += 1
        return False

    def _step_matrices(self, group: dict[str, Any], gradients: Mapping[str, Tensor]) -> None:
        for name, where in self.nested.items():
            part = local(self.matrices[name])
            if where.row == self.row and name in gradients:
                ways = {"gather": self._gathered, "gram": self._summed}
                update = ways[where.way](where, gradients[name], group) * update_scale("match_rms_adamw", *where.shape)
                apply_update(part, update, lr=group["lr"], weight_decay=group["weight_decay"])
        if len(self.data_ranks) > 1:
            for name in (n for n in self._used if n in self.nested):
                collectives.broadcast(
                    local(self.matrices[name]), self.data_ranks[self.nested[name].row], group=self.data_group
                )

    def _momentum(self, where: Nested, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[self.matrices[where.name]]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return next_momentum(
            state["momentum_buffer"],
            gradient,
            momentum=group["momentum"],
            form="heavy_ball",
            nesterov=group["nesterov"],
        )

    def _gathered(self, where: Nested, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Parts to the owner, whole matrix through Newton-Schulz there, parts of the update back."""
        ranks, mine = len(self.tensor_ranks), where.column == self.column
        owner = self.tensor_ranks[where.column]
        sizes = where.sizes(ranks)
        others = [r for r in range(ranks) if r != where.column and where.dim is not None and sizes[r]]
        if not mine and where.dim is not None:
            if not gradient.numel():
                return gradient
            collectives.send(gradient.contiguous(), owner, group=self.tensor_group)
            return collectives.recv(torch.empty_like(gradient), owner, group=self.tensor_group)
        if where.dim is None:  # every rank of the row holds all of it: the same bits on each, nothing to send
            self.histogram[where.name] += mine
            return self._orthogonalised(self._momentum(where, gradient, group), group)
        parts = {r: gradient.new_empty(where.part_shape(r, ranks)) for r in range(ranks)}
        parts[where.column] = gradient
        for r in others:
            collectives.recv(parts[r], self.tensor_ranks[r], group=self.tensor_group)
        whole = torch.cat([parts[r] for r in range(ranks)], dim=where.dim)
        update = self._orthogonalised(self._momentum(where, whole, group), group)
        self.histogram[where.name] += 1
        cut: tuple[Tensor, ...] = update.split(sizes, dim=where.dim)  # type: ignore[no-untyped-call]
        for r in others:
            collectives.send(cut[r].contiguous(), self.tensor_ranks[r], group=self.tensor_group)
        return cut[where.column]

    def _orthogonalised(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        found: Tensor = newton_schulz(matrix, steps=group["ns_steps"], coefficients=group["ns_coefficients"])
        return found

    def _summed(self, where: Nested, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Every rank orthogonalises its part; the row adds up norms and Gram matrices."""
        self.histogram[where.name] += where.column == self.column
        n = self._momentum(where, gradient, group)
        wide = n if where.dim == 1 else n.t()
        out = newton_schulz_sharded(
            wide.contiguous(),
            largest=lambda t: collectives.all_reduce(t, op="max", group=self.tensor_group),
            total=lambda t: collectives.all_reduce(t, group=self.tensor_group),
            steps=group["ns_steps"],
            coefficients=group["ns_coefficients"],
        )
        return out if where.dim == 1 else out.t()

    def _step_rest(self, group: dict[str, Any], gradients: Mapping[str, Tensor]) -> None:
        if self._adamw is None:
            return
        keys = ("lr", "weight_decay", "betas", "eps")
        self._adamw.param_groups[0].update({k: group[k] for k in keys})
        for name, part in self._parts.items():
            part.grad = gradients.get(name)
        self._adamw.step()
        for part in self._parts.values():
            part.grad = None

    def total_histogram(self) -> dict[str, int]:
        """How often each matrix was orthogonalised, over all ranks; exactly one owner means once a step. Collective."""
        row = torch.tensor([self.histogram[n] for n in self.matrices], dtype=torch.int64, device=self._device)
        return dict(zip(self.matrices, collectives.all_reduce(row).tolist(), strict=True))

    def payload(self) -> dict[str, int]:
        """Bytes that this rank hands to collectives in a step like the last one, by operation; receiving costs nothing.

        Every used matrix's part is reduced and broadcast. In its owner's row it is sent to the owner and the update's
        parts are sent back, or two numbers and the Gram matrices are all-reduced. The gradients of the other
        parameters are all-reduced, and so are a flag for each parameter and, unless ``"propagate"``, one for NaN.
        """
        found: Counter[str] = Counter()
        flags = len(self.matrices) + len(self.rest) + (self.nonfinite != "propagate")
        found["all_reduce"] = 8 * flags + sum(local(self.rest[n]).nbytes for n in self._used if n in self.rest)
        for where in (self.nested[n] for n in self._used if n in self.nested):
            part = local(self.matrices[where.name]).nbytes
            found["reduce"] += part
            found["broadcast"] += part * (len(self.data_ranks) > 1)
            if where.row != self.row or where.dim is None:
                continue
            if where.way == "gram":
                found["all_reduce"] += 4 * (2 + (1 + len(DEFAULT_RESTARTS)) * min(where.shape) ** 2)
            elif where.column == self.column:
                found["send"] += 4 * where.shape[0] * where.shape[1] - part
            else:
                found["send"] += part
        return {k: v for k, v in found.items() if v}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, by name; for the same mesh only.

        Matrices' momentum is where the plan says: whole at the owner, or cut as the parameters are.
        """
        momenta = {n: self.state[p]["momentum_buffer"] for n, p in self.matrices.items() if p in self.state}
        return {
            "layout": self._layout(),
            "momentum": momenta,
            "adamw": self._adamw.state_dict() if self._adamw else None,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }

    def _layout(self) -> list[Any]:
        shape = [len(self.data_ranks), len(self.tensor_ranks), self.row, self.column]
        return [shape, [[w.name, *w.shape, w.dim, w.row, w.column, w.way] for w in self.nested.values()]]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what :meth:`state_dict` of the rank at this place gave.

        Raises:
            ValueError: the state of another place, mesh or plan.
        """
        if state_dict["layout"] != self._layout():
            raise ValueError(
                f"this state is of place {state_dict['layout'][0]} (data and tensor ranks, row, column) or of another "
                f"plan; here is {self._layout()[0]}. The state of a tensor-parallel run fits the same mesh only"
            )
        for name, buffer in state_dict["momentum"].items():
            self.state[self.matrices[name]]["momentum_buffer"] = buffer.clone().to(self._device)
        if self._adamw is not None:
            self._adamw.load_state_dict(state_dict["adamw"])
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
