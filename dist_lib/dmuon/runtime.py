"""What every runtime of owner-sharded Muon has: the plan, the layers, the masters, the pass of the gradients, hooks.

A runtime moves gradients and weights of a model; it knows nothing of learning rates. :class:`~dist_lib.dmuon.DMuon`
is the optimizer on top of it; :mod:`~dist_lib.dmuon.ddp` and :mod:`~dist_lib.dmuon.fsdp` are the two kinds.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from dist_lib.comm import AgreementError, ExactReducer, Reducer, agree, collectives
from dist_lib.dmuon.config import LayerOf, RuntimeConfig, check_model, modules_of, numbered_layer
from dist_lib.dmuon.events import EventLog, Mark
from dist_lib.dmuon.packing import LayerGroup, Pack, make_groups
from dist_lib.dmuon.plan import OwnerPlan, make_plan
from dist_lib.dmuon.reduction import GradientPass
from dist_lib.dmuon.rest import HALF, Rest
from dist_lib.optim import ParameterSplit, split_parameters


@dataclass(frozen=True)
class _Agreed:
    """What all ranks must have in common before the first collective of training."""

    mode: str
    plan: OwnerPlan
    config: RuntimeConfig
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    rest: tuple[str, ...]


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a (nested) output that requires a gradient."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None


class Runtime(ABC):
    """Base of the runtimes.

    Args:
        model: the plain module, on the device where it trains, with equal parameter names on every rank; what it
            cannot be: see :func:`~dist_lib.dmuon.config.check_model`. Weights and buffers are set to those of rank 0.
        plan: owners for the ranks of the data-parallel world; made by ``make_plan(..., method="lpt")`` if left out.
        split: which parameters are matrices; default: :func:`~dist_lib.optim.split_parameters`.
        config: see :class:`~dist_lib.dmuon.RuntimeConfig`.
        reducer: how gradients are averaged; default: exact, in the backend's order.
        layer_of: layer of a parameter's name, which must be a module whose forward runs before the parameter is read.

    Raises:
        ValueError, TypeError: what is not supported, before anything was changed.
        AgreementError: on every rank if plans, shapes, data types or options differ between ranks.

    Attributes:
        model, plan, config: as above.
        matrices: name and parameter of all matrices, on every rank.
        masters: name and tensor that the owner updates: the parameter, or a float32 copy; only this rank's.
        rest: the other parameters.
        log: events; set ``log.enabled`` to record.
    """

    mode = ""

    def __init__(
        self,
        model: nn.Module,
        plan: OwnerPlan | None = None,
        *,
        split: ParameterSplit | None = None,
        config: RuntimeConfig | None = None,
        reducer: Reducer | None = None,
        layer_of: LayerOf = numbered_layer,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.config = model, config or RuntimeConfig()
        self.reducer: Reducer = reducer or ExactReducer()
        self.group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.world_size, self.rank = len(self.ranks), self.ranks.index(dist.get_rank())
        with self._together():
            check_model(model, sharded=self.mode == "fsdp")
            split = split_parameters(model) if split is None else split
            self.matrices: dict[str, Parameter] = dict(split.muon)
            rest = dict(split.adamw)
            self._check_split(rest)
            self._check_config(rest)
            self.plan = make_plan(split.muon, self.world_size) if plan is None else plan
            self._check_plan()
            modules = modules_of(model, {id(p): n for n, p in self.matrices.items()}, layer_of)
        tensors = tuple((n, tuple(p.shape), p.dtype) for n, p in model.state_dict(keep_vars=True).items())
        agree(_Agreed(self.mode, self.plan, self.config, tensors, tuple(rest)), what="the owner plan", group=group)
        self.device = next(model.parameters()).device
        self._start_equal()
        self.masters = self._convert(rest)
        self.groups = make_groups(self.matrices, self.plan.owners, layer_of, self.config)
        agree(self.groups, what="the layers of the owner plan", group=group)
        self._group_of = {name: g for g in self.groups for name in g.names}
        self.log = EventLog(dist.get_rank(), self.device, enabled=self.config.record)
        self.rest = self._make_rest(rest)
        self.reduction = GradientPass(
            tuple(reversed(self.groups)),
            self.matrices,
            self._transport,
            self.log,
            group=group,
            overlap=self.config.overlap,
            extra=rest if self.mode == "ddp" else {},
        )
        self.reduction.on_gradient = self._gradient_arrived
        self._missing: dict[str, set[str]] = {}
        self._marks: dict[tuple[str, str], Mark | None] = {}
        self._handles: list[RemovableHandle] = []
        for layer_group in self.groups:
            for module in modules[layer_group.layer]:
                self._handles += self._hook(layer_group, module)
        self._handles.append(model.register_state_dict_pre_hook(lambda *_: self._before_state_dict()))

    @abstractmethod
    def _make_rest(self, rest: dict[str, Parameter]) -> Rest: ...
    @abstractmethod
    def _transport(self, pack: Pack, flat: Tensor) -> Tensor | None: ...
    @abstractmethod
    def _before_forward(self, group: LayerGroup) -> None: ...
    @abstractmethod
    def _after_forward(self, group: LayerGroup) -> None: ...
    @abstractmethod
    def _before_backward(self, group: LayerGroup) -> None: ...
    @abstractmethod
    def _after_backward(self, group: LayerGroup) -> None: ...
    @abstractmethod
    def _before_state_dict(self) -> None: ...
    @abstractmethod
    def publish(self) -> None:
        """Make the owners' new weights known, or see to it that they will be before they are read. Collective."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for everything on its way; afterwards no transfer is pending."""

    def owner(self, name: str) -> int:
        """Rank, within the data-parallel world, that owns a matrix."""
        return self.plan.owner(name)

    def layer_name(self, name: str) -> str:
        """Layer of a matrix."""
        return self._group_of[name].layer

    @property
    def owned(self) -> list[str]:
        """Names of this rank's matrices, in the model's order."""
        return [name for name in self.matrices if self.owner(name) == self.rank]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All trained parameters by name, in the model's order."""
        known = {**self.matrices, **self.rest.parameters}
        return {n: p for n, p in self.model.named_parameters() if n in known}

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, backward adds gradients up on each rank and sends nothing."""
        return self.reduction.paused()

    def finish_backward(self) -> None:
        """Bring all gradients to their owners. Collective; ``step`` and clipping call it."""
        if not self.reduction.finished:
            used = self.reduction.finish()
            self.rest.reduce()
            self.rest.keep_used(used if self.mode == "ddp" else set(self.rest.parameters))

    def gradient(self, name: str) -> Tensor | None:
        """The averaged gradient of a matrix on its owner after :meth:`finish_backward`; elsewhere None."""
        return self.reduction.gradients.get(name)

    def clear_gradients(self) -> None:
        """Forget all gradients.

        Raises:
            RuntimeError: reductions have begun and not ended.
        """
        self.reduction.clear()
        self.rest.clear()

    def state_bytes(self) -> int:
        """Bytes of what this rank alone holds of the matrices: masters and parameters with storage."""
        held = [p for p in self.matrices.values() if p.untyped_storage().nbytes()]
        own = [m for n, m in self.masters.items() if m is not self.matrices[n]]
        return sum(t.nbytes for t in (*held, *own))

    def close(self) -> None:
        """Wait for everything on its way and take all hooks off the model."""
        self.drain()
        self.reduction.remove_hooks()
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Raise on every rank if the block raises on one, so that none waits for it."""
        refusal: Exception | None = None
        try:
            yield
        except (ValueError, TypeError) as error:
            refusal = error
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        flag = torch.tensor([int(refusal is not None)], dtype=torch.int32, device=device)
        refused = [r for r, f in zip(self.ranks, collectives.all_gather(flag, group=self.group), strict=True) if f]
        if refusal is not None:
            raise refusal
        if refused:
            raise AgreementError(f"ranks {refused} refuse the model or the plan that this rank accepts", refused)

    def _check_split(self, rest: dict[str, Parameter]) -> None:
        known = dict(self.model.named_parameters())
        for name, p in {**self.matrices, **rest}.items():
            if known.get(name) is not p:
                raise ValueError(f"the split names {name}, which is not that parameter of this model")
            if not p.requires_grad:
                raise ValueError(f"the split names {name}, which requires no gradient: leave frozen parameters out")
        left = [n for n, p in known.items() if p.requires_grad and n not in self.matrices and n not in rest]
        if left:
            raise ValueError(f"the split leaves out {', '.join(left[:5])}; give every trained parameter a place")

    @abstractmethod
    def _check_config(self, rest: dict[str, Parameter]) -> None:
        """Refuse options that this kind of runtime cannot honour for these parameters."""

    def _check_plan(self) -> None:
        if self.plan.world_size != self.world_size:
            raise ValueError(
                f"the plan is for {self.plan.world_size} ranks, this group has {self.world_size}; make a new plan"
            )
        planned = {m.name: tuple(m.shape) for m in self.plan.matrices}
        actual = {n: tuple(p.shape) for n, p in self.matrices.items()}
        if planned != actual:
            wrong = sorted(n for n in {*planned, *actual} if planned.get(n) != actual.get(n))
            raise ValueError(
                f"the plan is not of this model; these are missing or have another shape: {', '.join(wrong[:5])}; "
                f"plan the matrices of split_parameters(model).muon"
            )

    @torch.no_grad()
    def _start_equal(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.numel():
                collectives.broadcast(tensor, self.ranks[0], group=self.group)

    @torch.no_grad()
    def _convert(self, rest: dict[str, Parameter]) -> dict[str, Parameter]:
        masters: dict[str, Parameter] = {}
        for name, p in self.matrices.items():
            original, dtype = p.detach(), self.config.param_dtype(name, p.dtype)
            if self.owner(name) == self.rank:
                keep = self.config.master and dtype in HALF
                masters[name] = Parameter(original.to(torch.float32, copy=True)) if keep else p
            p.data = original.to(dtype)
        for name, p in rest.items():
            p.data = p.detach().to(self.config.param_dtype(name, p.dtype))
        return masters

    def _hook(self, group: LayerGroup, module: nn.Module) -> Iterator[RemovableHandle]:
        def before(*_: Any) -> None:
            self._before_forward(group)
            self._marks["forward", group.layer] = self.log.mark()

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.log.add("forward", group.layer, 0, self._marks.pop(("forward", group.layer), None))
            tensor = first_tensor(output) if torch.is_grad_enabled() else None
            if tensor is not None:
                tensor.register_hook(self._backward_begins(group))
                self._missing[group.layer] = set(group.names)
            self._after_forward(group)

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after)

    def _backward_begins(self, group: LayerGroup) -> Callable[[Tensor], None]:
        def begins(_: Tensor) -> None:
            self._before_backward(group)
            self._marks.setdefault(("backward", group.layer), self.log.mark())

        return begins

    def _gradient_arrived(self, name: str) -> None:
        group = self._group_of[name]
        missing = self._missing.get(group.layer)
        if missing is not None:
            missing.discard(name)
            if not missing:
                del self._missing[group.layer]
                self.log.add("backward", group.layer, 0, self._marks.pop(("backward", group.layer), None))
                self._after_backward(group)
