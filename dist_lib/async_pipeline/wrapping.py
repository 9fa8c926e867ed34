"""A ``torch.optim.Optimizer`` around another one, for corrections that sit before or after its step.

The wrapper shows the inner optimizer's parameter groups and state, so learning-rate schedulers, ``zero_grad`` and
checkpoints treat it as the optimizer itself; what it remembers on top goes under a key of its own into ``state_dict``.
It has no mathematics: see ``error_feedback`` and ``mitigations``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTUM_OPTIONS = ("momentum", "beta1", "beta", "betas")


def momentum_of(group: Mapping[str, Any]) -> float | None:
    """The momentum coefficient of a parameter group, by the names of its options.

    ``momentum`` (SGD, Muon, RMSprop), ``beta1``, ``beta``, or the first of ``betas`` (the Adam family, Lion, Adan,
    SOAP, MARS); the first of these names that the group has counts.

    Returns:
        The coefficient; 0.0 for one that is None; None if the group has no such option, so that the optimizer has no
        momentum (Adagrad, Adafactor), or hides it.
    """
    for name in MOMENTUM_OPTIONS:
        if name in group:
            value = group[name]
            if isinstance(value, (tuple, list)):
                value = value[0] if value else 0.0
            return float(value) if value is not None else 0.0
    return None


class OptimizerWrapper(Optimizer):
    """Base of the wrappers; its own step is the inner optimizer's.

    Subclasses override ``_step_inner``, and ``_extra_state`` and ``_load_extra_state`` with ``STATE_KEY``
    if they remember anything. Wrappers nest.

    Args:
        optimizer: any optimizer whose ``step`` works without a closure.

    Raises:
        TypeError: not an optimizer, or LBFGS, which evaluates the model several times within a step.

    Attributes:
        optimizer: the inner optimizer.
    """

    STATE_KEY = ""
    _built = False

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(self).__name__} wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the model several times within one step, so its gradients have no fixed delay; use an "
                "optimizer that takes one gradient a step"
            )
        self.optimizer = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], dict(optimizer.defaults))
        self._built = True

    def __getstate__(self) -> dict[str, Any]:
        # The base class would leave out the inner optimizer; "step" is there once a scheduler has replaced it, with a
        # closure that belongs to this very object.
        return {key: value for key, value in self.__dict__.items() if key != "step"}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, the same objects."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """The base class sets its own list; the inner optimizer's groups count."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        """The base class sets its own mapping; the inner optimizer's state counts."""

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer.

        Raises:
            ValueError, TypeError: a group that it refuses.
        """
        if self._built:
            self.optimizer.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the inner optimizer, corrected.

        Args:
            closure: evaluates the model, once, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_inner([p for p in self.parameters if p.grad is not None])
        return loss

    def _step_inner(self, updated: list[Tensor]) -> None:
        """Step the inner optimizer; ``updated`` are the parameters that have a gradient."""
        self.optimizer.step()

    def _extra_state(self) -> dict[str, Any]:
        """What this wrapper remembers: plain data and tensors."""
        return {}

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Take over what ``_extra_state`` returned."""

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's ``state_dict`` with one more entry; loads with ``torch.load(weights_only=True)``.

        Tensors are not copied, as with torch's optimizers: save or copy it before the next step.
        """
        saved = dict(self.optimizer.state_dict())
        if self.STATE_KEY:
            saved[self.STATE_KEY] = self._extra_state()
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what ``state_dict`` returned; options in it count, as with torch's optimizers.

        Raises:
            ValueError: state of an optimizer without this wrapper, or of other parameters.
        """
        saved = dict(state_dict)
        if self.STATE_KEY:
            if self.STATE_KEY not in saved:
                raise ValueError(
                    f"this state has no entry {self.STATE_KEY!r}: it was saved without {type(self).__name__}. To start "
                    f"the correction now, load it into the inner optimizer (.optimizer.load_state_dict)"
                )
            extra = saved.pop(self.STATE_KEY)
            self._check_extra_state(extra)
            self.optimizer.load_state_dict(saved)
            self._load_extra_state(extra)
        else:
            self.optimizer.load_state_dict(saved)

    def _check_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Refuse state that does not fit, before anything changes."""

    def _indexed(self, tensors: Mapping[Tensor, Tensor]) -> dict[int, Tensor]:
        """Tensors by the position of their parameter, as ``state_dict`` numbers them."""
        return {i: tensors[p] for i, p in enumerate(self.parameters) if p in tensors}

    def _check_indexed(self, saved: Mapping[int, Tensor], what: str) -> None:
        parameters = self.parameters
        for index, tensor in saved.items():
            shape = tuple(parameters[index].shape) if 0 <= index < len(parameters) else None
            if shape != tuple(tensor.shape):
                raise ValueError(
                    f"the saved {what} of parameter {index} has shape {tuple(tensor.shape)}; here that parameter "
                    f"{f'has shape {shape}' if shape is not None else 'does not exist'}"
                )
