"""The optimizer over a runtime: Muon on owned matrices, AdamW on shards of the rest, one list of real parameters.

Learning-rate schedulers see the model's own parameters in ``param_groups``; each rank updates only what it owns, with
the options found there. The arithmetic is that of :class:`~dist_lib.optim.Muon` and ``torch.optim.AdamW``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from dist_lib.comm import agree, collectives
from dist_lib.dmuon.runtime import Runtime
from dist_lib.optim import Muon
from dist_lib.optim.scales import BOOKKEEPING

MUON_KEYS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "momentum_form",
    "scale",
    "ns_steps",
    "ns_coefficients",
    "split_sizes",
    "maximize",
)
ADAMW_KEYS = ("lr", "weight_decay", "betas", "eps", "maximize")


class OwnedMuon(Muon):
    """Muon that counts each matrix by name and orthogonalises equal shapes in the batches of the plan."""

    def __init__(self, params: Any, *, names: Mapping[int, str], runtime: Runtime, **options: Any) -> None:
        super().__init__(params, nonfinite="propagate", **options)
        self._names, self._runtime = dict(names), runtime
        batches = runtime.plan.batches_of(runtime.rank)
        self._batch_of = {name: i for i, batch in enumerate(batches) for name in batch}
        self.histogram: Counter[str] = Counter()

    def _step_group(self, group: dict[str, Any]) -> None:
        by_batch: dict[int, list[Tensor]] = {}
        for p in group["params"]:
            by_batch.setdefault(self._batch_of[self._names[id(p)]], []).append(p)
        for index in sorted(by_batch):
            super()._step_group({**group, "params": by_batch[index]})

    def _update(self, batch: Any, group: dict[str, Any]) -> None:
        layer = self._runtime.layer_name(self._names[id(batch[0].p)])
        with self._runtime.log.span("orthogonalise", layer):
            super()._update(batch, group)
        for block in batch:
            if block.index == 0:
                self.histogram[self._names[id(block.p)]] += 1


class DMuon(Optimizer):
    """Muon with one owner a matrix, and AdamW for everything else.

    ``backward`` leaves gradients to the runtime; ``step`` is collective. It brings what is left to the owners, lets
    them update, and publishes. A matrix that no rank used since ``zero_grad`` is left alone, as torch does with
    ``grad is None``. Parameters' own ``.grad`` is None after a reduction; see ``runtime.gradient(name)``.

    Not supported: gradient scaling (use bfloat16), closures that are called more than once.

    Args:
        runtime: of the model.
        lr: learning rate of both; a float or a Tensor of one element.
        adamw_lr: of AdamW, if another.
        weight_decay: of both, decoupled.
        betas, eps: of AdamW.
        groups: ``{"params": names or parameters, "name": str, options...}``, to give options to some parameters. Each
            becomes up to two entries of ``param_groups``, called ``<name>/muon`` and ``<name>/adamw``; what no group
            takes goes to ``muon`` and ``adamw``.
        nonfinite: with NaN or infinity in any averaged gradient on any rank, ``"raise"`` FloatingPointError on every
            rank, ``"skip"`` the whole step everywhere, or ``"propagate"`` (no look, no exchange).
        **muon: further options of :class:`~dist_lib.optim.Muon`.

    Raises:
        ValueError: an option or group that is not allowed.
        AgreementError: options that differ between ranks.

    Attributes:
        skipped_steps: steps left out because of ``nonfinite="skip"``.
    """

    def __init__(
        self,
        runtime: Runtime,
        lr: float | Tensor = 1e-3,
        *,
        adamw_lr: float | Tensor | None = None,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        groups: Sequence[Mapping[str, Any]] = (),
        nonfinite: str = "raise",
        **muon: Any,
    ) -> None:
        if nonfinite not in ("raise", "skip", "propagate"):
            raise ValueError(f"nonfinite = {nonfinite!r}; it must be one of raise, skip, propagate")
        self.runtime, self.nonfinite, self.skipped_steps = runtime, nonfinite, 0
        probe = Muon([Parameter(torch.zeros(1, 1))], lr, weight_decay=weight_decay, **muon).param_groups[0]
        self._muon_defaults = {k: probe[k] for k in MUON_KEYS}
        adamw = {"lr": lr if adamw_lr is None else adamw_lr, "betas": betas, "eps": eps}
        self._adamw_defaults = {**adamw, "weight_decay": weight_decay, "maximize": probe["maximize"]}
        self._names = {id(p): n for n, p in runtime.parameters.items()}
        self._closed = False
        super().__init__(self._make_groups(groups), {})
        self._closed = True
        plain = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        agree(plain, what="the optimizer's groups", group=runtime.group)
        self.muon = self._make_muon()
        self.adamw = self._make_adamw()
        self.last_norm: Tensor | None = None

    def _make_groups(self, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        parameters, taken, out = self.runtime.parameters, set[str](), []
        for index, entry in enumerate(given):
            label = str(entry.get("name", f"group{index}"))
            names = [self._name(x) for x in _listed(entry.get("params", ()))]
            twice = sorted({n for n in names if names.count(n) > 1} | (taken & set(names)))
            if twice or not names:
                raise ValueError(f"group {label!r}: no parameters, or some that a group has already: {twice[:5]}")
            taken |= set(names)
            options = {k: v for k, v in entry.items() if k not in ("params", "name")}
            out += self._two(f"{label}/", names, options)
        return out + self._two("", [n for n in parameters if n not in taken], {})

    def _two(self, prefix: str, names: list[str], options: dict[str, Any]) -> list[dict[str, Any]]:
        out = []
        kinds = (("muon", self._muon_defaults, MUON_KEYS), ("adamw", self._adamw_defaults, ADAMW_KEYS))
        unknown = set(options) - set(MUON_KEYS) - set(ADAMW_KEYS) - BOOKKEEPING
        if unknown:
            raise ValueError(f"unknown option {', '.join(sorted(unknown))}; there are {MUON_KEYS} and {ADAMW_KEYS}")
        for kind, defaults, keys in kinds:
            chosen = [n for n in names if (n in self.runtime.matrices) == (kind == "muon")]
            if chosen:
                own = {k: v for k, v in options.items() if k in keys}
                params = [self.runtime.parameters[n] for n in chosen]
                out.append({"params": params, "names": chosen, "name": f"{prefix}{kind}", **defaults, **own})
        return out

    def _name(self, item: str | Tensor) -> str:
        name = item if isinstance(item, str) else self._names.get(id(item), "")
        if name not in self.runtime.parameters:
            shown = name or f"a parameter of shape {tuple(item.shape)}"  # type: ignore[union-attr]
            raise ValueError(f"{shown} is not a trained parameter of this model")
        return name

    def _make_muon(self) -> OwnedMuon | None:
        groups, names = [], {}
        for group in self.param_groups:
            if group["name"].endswith("muon"):
                own = [n for n in group["names"] if n in self.runtime.masters]
                names.update({id(self.runtime.masters[n]): n for n in own})
                options = {k: group[k] for k in MUON_KEYS}
                groups.append({"params": [self.runtime.masters[n] for n in own], "name": group["name"], **options})
        return OwnedMuon(groups, names=names, runtime=self.runtime) if groups else None

    def _make_adamw(self) -> AdamW | None:
        groups = []
        for group in self.param_groups:
            if group["name"].endswith("adamw"):
                shards = [self.runtime.rest.shards[n] for n in group["names"]]
                groups.append({"params": shards, "name": group["name"], **{k: group[k] for k in ADAMW_KEYS}})
        return AdamW(groups) if groups else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: owners and shards are laid out once.

        Raises:
            ValueError: always, once the optimizer stands.
        """
        if self._closed:
            raise ValueError("groups are fixed when the optimizer is made: pass them as groups=")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those at their owners; they become None whatever ``set_to_none`` says.

        Raises:
            RuntimeError: some are on their way (a backward without a step), see ``runtime.finish_backward``.
        """
        self.runtime.clear_gradients()

    def _square_sums(self) -> Tensor:
        """Squared norm of each matrix's gradient and of each rank's part of the rest, equal on all ranks; float64.

        Every entry has one non-zero contribution, so their sum is exact and does not depend on the owners.
        """
        runtime = self.runtime
        names = list(runtime.matrices)
        row = torch.zeros(len(names) + runtime.world_size, dtype=torch.float64, device=runtime.device)
        for i, name in enumerate(names):
            gradient = runtime.gradient(name)
            if gradient is not None:
                row[i] = gradient.double().square().sum()
        row[len(names) + runtime.rank] = runtime.rest.square_sum()
        return collectives.all_reduce(row, group=runtime.group)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their global L2 norm is at most ``max_norm``; return the norm before. Collective.

        The norm and the coefficient are those of ``torch.nn.utils.clip_grad_norm_`` on one process that holds the
        averaged gradients of all parameters. Once a step, between the last backward and ``step``.

        Raises:
            ValueError: a ``max_norm`` that is not positive.
            RuntimeError: a norm that is not finite, with ``error_if_nonfinite``.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm = {max_norm}; it must be above 0 (float('inf') only measures)")
        self.runtime.finish_backward()
        norm = self._square_sums().sum().sqrt()
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of all gradients is {float(norm)}, so they cannot be clipped")
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in (*self.runtime.reduction.gradients.values(), *self.runtime.rest.gradients()):
            gradient.mul_(coefficient.to(gradient.dtype))
        self.last_norm = norm
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. Collective: every rank calls it, with or without gradients of its own.

        Raises:
            FloatingPointError: on every rank, with ``nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runtime.drain()
        self.runtime.finish_backward()
        if self._may_step():
            self._mirror()
            self._update()
            self.runtime.publish()
        self.runtime.reduction.restart()
        return loss

    def _may_step(self) -> bool:
        if self.nonfinite == "propagate":
            return True
        bad = [n for n, g in self.runtime.reduction.gradients.items() if not bool(torch.isfinite(g).all())]
        other = any(not bool(torch.isfinite(g).all()) for g in self.runtime.rest.gradients())
        flag = torch.tensor([len(bad), int(other)], dtype=torch.int32, device=self.runtime.device)
        total = collectives.all_reduce(flag, group=self.runtime.group).tolist()
        if not any(total):
            return True
        if self.nonfinite == "raise":
            raise FloatingPointError(
                f"gradients of {total[0]} matrices and of the other parameters on {total[1]} ranks hold NaN or "
                f"infinity (matrices of this rank: {bad[:3] or 'none'}); nothing was changed. Use nonfinite='skip' to "
                f"leave such steps out on all ranks"
            )
        self.skipped_steps += 1
        return False

    def _mirror(self) -> None:
        """Give the inner optimizers the options of the outer groups, which schedulers write."""
        for kind, keys, inner in (("muon", MUON_KEYS, self.muon), ("adamw", ADAMW_KEYS, self.adamw)):
            outer = [g for g in self.param_groups if g["name"].endswith(kind)]
            for source, target in zip(outer, inner.param_groups if inner else [], strict=True):
                target.update({k: source[k] for k in keys})

    def _update(self) -> None:
        runtime = self.runtime
        if self.muon is not None:
            for name, master in runtime.masters.items():
                gradient = runtime.gradient(name)
                master.grad = None if gradient is None else gradient.to(master.dtype)
            self.muon.step()
            for name, master in runtime.masters.items():
                master.grad = None
                p = runtime.matrices[name]
                if p is not master:
                    p.copy_(master)
        if self.adamw is not None:
            with runtime.log.span("adamw"):
                self.adamw.step()

    @property
    def histogram(self) -> Counter[str]:
        """How often this rank has orthogonalised each matrix of its own."""
        return Counter() if self.muon is None else self.muon.histogram

    def total_histogram(self) -> dict[str, int]:
        """How often each matrix was orthogonalised, over all ranks; exactly one owner means once a step. Collective."""
        names = list(self.runtime.matrices)
        row = torch.tensor([self.histogram[n] for n in names], dtype=torch.int64, device=self.runtime.device)
        collectives.all_reduce(row, group=self.runtime.group)
        return dict(zip(names, row.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state lies on its owners, and a plain state_dict would silently hold a part of it.

        Raises:
            RuntimeError: always; use :mod:`dist_lib.dmuon.checkpoint`.
        """
        raise RuntimeError(
            f"rank {dist.get_rank()} holds only its own part of the optimizer's state; use "
            f"dist_lib.dmuon.save_checkpoint / load_checkpoint, which keep all of it by name"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Refused, as :meth:`state_dict` is.

        Raises:
            RuntimeError: always; use :mod:`dist_lib.dmuon.checkpoint`.
        """
        raise RuntimeError("the state of this optimizer lies on its owners: use dist_lib.dmuon.load_checkpoint")


def _listed(params: Any) -> list[Any]:
    if isinstance(params, (str, Tensor)):
        return [params]
    return [item[1] if isinstance(item, tuple) else item for item in params]
