"""Muon for the matrices and AdamW for the rest behind one ``torch.optim.Optimizer``, for those who want one line.

It adds no mathematics: it holds the two optimizers, shows their groups as one list, and steps both or neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dist_lib.optim.muon import Muon, gradients_finite
from dist_lib.optim.routing import ParameterSplit, split_parameters


class MuonWithAdamW(Optimizer):
    """Muon for hidden matrices, AdamW for embeddings, head, norms and biases.

    With the default scale of Muon, ``match_rms_adamw``, one learning rate serves both. Schedulers and gradient scalers
    see all groups in ``param_groups``, those of Muon first; each has an entry ``"name"``, ``"muon"`` or ``"adamw"``.

    Args:
        parameters: a model, sorted by :func:`~dist_lib.optim.split_parameters`, or a split made beforehand.
        lr: of both, unless ``adamw_lr`` is given.
        adamw_lr: of AdamW.
        weight_decay: of both.
        betas: of AdamW.
        eps: of AdamW.
        nonfinite: as for :class:`~dist_lib.optim.Muon`, decided over all parameters together.
        **muon: further options of :class:`~dist_lib.optim.Muon`.

    Raises:
        ValueError: no parameter for Muon, or an option that is not allowed.

    Attributes:
        muon: the inner Muon.
        adamw: the inner AdamW, or None if it would have no parameter.
        skipped_steps: steps left out because of ``nonfinite="skip"``.
    """

    _built = False

    def __init__(
        self,
        parameters: nn.Module | ParameterSplit,
        lr: float | Tensor = 1e-3,
        *,
        adamw_lr: float | Tensor | None = None,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
        **muon: Any,
    ) -> None:
        split = split_parameters(parameters) if isinstance(parameters, nn.Module) else parameters
        if not split.muon:
            raise ValueError("no parameter is for Muon (see ParameterSplit.explain()): use torch.optim.AdamW alone")
        if nonfinite not in ("raise", "skip", "propagate"):
            raise ValueError(f"nonfinite = {nonfinite!r}; it must be one of raise, skip, propagate")
        groups = [{"params": split.muon, "name": "muon"}]
        self.muon = Muon(groups, lr, weight_decay=weight_decay, nonfinite="propagate", **muon)
        self.adamw: AdamW | None = None
        if split.adamw:
            self.adamw = AdamW(
                [{"params": split.adamw, "name": "adamw"}],  # type: ignore[list-item]
                lr if adamw_lr is None else adamw_lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
            )
        self.nonfinite, self.skipped_steps = nonfinite, 0
        super().__init__([p for _, p in (*split.muon, *split.adamw)], {})
        self._built = True

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # the base class would leave out the inner optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The inner optimizers."""
        return [self.muon] if self.adamw is None else [self.muon, self.adamw]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of both, the same objects that the inner optimizers use."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """The base class sets its own list; the inner optimizers' groups count."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State of both, by parameter."""
        pairs = chain.from_iterable(optimizer.state.items() for optimizer in self.optimizers)
        return defaultdict(dict, pairs)

    @state.setter
    def state(self, value: Any) -> None:
        """The base class sets its own mapping; the inner optimizers' state counts."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer that its entry ``"name"`` names.

        Raises:
            ValueError: no such entry, or a group that the inner optimizer refuses.
        """
        if not self._built:
            return
        target = {"muon": self.muon, "adamw": self.adamw}.get(param_group.get("name", ""))
        if target is None:
            raise ValueError(
                f"a group named {param_group.get('name')!r}: set its 'name' to 'muon' or 'adamw' (an optimizer that "
                f"this one has)"
            )
        known = {id(p) for group in self.param_groups for p in group["params"]}
        given = param_group["params"]
        for item in [given] if isinstance(given, Tensor) else given:
            if id(item[1] if isinstance(item, tuple) else item) in known:
                raise ValueError("a parameter of this group already has an optimizer")
        target.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both, or of neither.

        Raises:
            FloatingPointError: NaN or infinity in a gradient with ``nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.nonfinite != "propagate" and not gradients_finite([p for g in self.param_groups for p in g["params"]]):
            if self.nonfinite == "raise":
                raise FloatingPointError("a gradient holds NaN or infinity; nothing was changed")
            self.skipped_steps += 1
            return loss
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: another number of groups or parameters.
        """
        saved = list(state_dict["param_groups"])
        if len(saved) != len(self.param_groups):
            raise ValueError(f"the saved state has {len(saved)} groups, this optimizer {len(self.param_groups)}")
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            groups, saved = saved[:count], saved[count:]
            keys = {key for group in groups for key in group["params"]}
            state = {k: v for k, v in state_dict["state"].items() if k in keys}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
