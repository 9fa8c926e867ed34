"""What else has been proposed against stale gradients, as baselines for error feedback.

Each is small: gradients extrapolated in time, compensated by a diagonal estimate of curvature (DC-ASGD), evaluated at
predicted weights (SpecTrain, XPipe), or a lower learning rate (PipeMare). Starting synchronously is an option of the
emulator. None is tuned here; whether one helps is for a measurement to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dist_lib.async_pipeline.wrapping import OptimizerWrapper


class GradientExtrapolation(OptimizerWrapper):
    """Feed the optimizer ``g + strength (g - g_previous)`` in place of the gradient ``g``.

    It looks like error feedback but sits before the optimizer: the extrapolation also enters second moments and
    orthogonalisation, and amplifies noise there. A parameter's first gradient goes in as it is; one without a
    gradient starts again. ``.grad`` is changed by the step and put back afterwards.

    Args:
        optimizer: the inner optimizer.
        strength: 1 extrapolates by a whole step.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: a negative strength.
    """

    STATE_KEY = "gradient_extrapolation"

    def __init__(self, optimizer: Optimizer, *, strength: float = 1.0) -> None:
        if not 0.0 <= strength < float("inf"):
            raise ValueError(f"strength = {strength}: it must be finite and at least 0")
        super().__init__(optimizer)
        self.strength = float(strength)
        self._previous: dict[Tensor, Tensor] = {}

    def _step_inner(self, updated: list[Tensor]) -> None:
        given = {p: p.grad for p in updated}
        for p, gradient in given.items():
            require_dense(p)
            previous = self._previous.get(p)
            if previous is not None and gradient is not None:
                p.grad = gradient + self.strength * (gradient - previous)
        try:
            self.optimizer.step()
        finally:
            for p, gradient in given.items():
                p.grad = gradient
        self._previous = {p: g.detach().clone() for p, g in given.items() if g is not None}

    def _extra_state(self) -> dict[str, Any]:
        return {"strength": self.strength, "previous": self._indexed(self._previous)}

    def _check_extra_state(self, extra: Mapping[str, Any]) -> None:
        self._check_indexed(extra["previous"], "gradient")

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self.strength = float(extra["strength"])
        self._previous = _loaded(self.parameters, extra["previous"])


class DCASGD(OptimizerWrapper):
    """Compensate a gradient that is one update old: ``g + strength g g (w - w_stale)``, elementwise.

    ``g g`` stands in for the curvature (DC-ASGD, Zheng et al. 2017). ``w`` are the weights now, ``w_stale`` those
    before the last update, at which the gradient was taken; so this is for a constant delay of one.

    Args:
        optimizer: the inner optimizer.
        strength: lambda.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: a negative strength.
    """

    STATE_KEY = "dc_asgd"

    def __init__(self, optimizer: Optimizer, *, strength: float = 0.04) -> None:
        if not 0.0 <= strength < float("inf"):
            raise ValueError(f"strength = {strength}: it must be finite and at least 0")
        super().__init__(optimizer)
        self.strength = float(strength)
        self._stale: dict[Tensor, Tensor] = {}

    def _step_inner(self, updated: list[Tensor]) -> None:
        given = {p: p.grad for p in updated}
        stale = {p: p.detach().clone() for p in self.parameters}
        for p, gradient in given.items():
            require_dense(p)
            if gradient is not None and p in self._stale:
                p.grad = gradient + self.strength * gradient * gradient * (p - self._stale[p])
        try:
            self.optimizer.step()
        finally:
            for p, gradient in given.items():
                p.grad = gradient
        self._stale = stale

    def _extra_state(self) -> dict[str, Any]:
        return {"strength": self.strength, "stale": self._indexed(self._stale)}

    def _check_extra_state(self, extra: Mapping[str, Any]) -> None:
        self._check_indexed(extra["stale"], "weights")

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self.strength = float(extra["strength"])
        self._stale = _loaded(self.parameters, extra["stale"])


def require_dense(p: Tensor) -> None:
    """Refuse sparse gradients.

    Raises:
        TypeError: the parameter's gradient is sparse.
    """
    if p.grad is not None and p.grad.is_sparse:
        raise TypeError(f"a parameter of shape {tuple(p.shape)} has a sparse gradient; this needs dense ones")


def _loaded(parameters: list[Tensor], saved: Mapping[int, Tensor]) -> dict[Tensor, Tensor]:
    return {parameters[i]: t.detach().to(parameters[i], copy=True) for i, t in saved.items()}


@dataclass(frozen=True, kw_only=True)
class WeightPrediction:
    """Evaluate gradients at weights predicted from the last update, ``w + strength d (w - w_before)``.

    ``d`` is the number of updates that will have been made by the time the gradient is applied (SpecTrain, XPipe).
    With a delay of one and no weight decay this is error feedback in another variable (our derivation): the predicted
    weights are the weights of error feedback, if that had also corrected its first update.

    Attributes:
        strength: 1 predicts by whole updates.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.strength < float("inf"):
            raise ValueError(f"strength = {self.strength}: it must be finite and at least 0")

    def predict(self, weights: Tensor, before: Tensor, updates: int) -> Tensor:
        """Weights ``updates`` updates ahead, in storage of their own.

        Args:
            weights: the version that is known, any shape.
            before: the version before it.
            updates: d, how far ahead.
        """
        return weights + (self.strength * updates) * (weights - before)


def lr_for_delay(lr: float, delay: int, *, step: int = 0, anneal_steps: int = 0) -> float:
    """A learning rate lowered for a delay: ``lr / (1 + delay)^p`` with p falling from 1 to 0 over ``anneal_steps``.

    The form is PipeMare's; the base ``1 + delay`` is ours: on a quadratic, plain gradient descent is stable up to a
    rate of 2 without delay and of 1 with a delay of one.

    Args:
        lr: learning rate without delay.
        delay: in updates.
        step: updates made so far.
        anneal_steps: updates until the full rate is reached; 0 keeps the reduction for good.

    Raises:
        ValueError: a negative delay, step or ``anneal_steps``.
    """
    if delay < 0 or step < 0 or anneal_steps < 0:
        raise ValueError(f"delay {delay}, step {step}, anneal_steps {anneal_steps}: none may be negative")
    power = 1.0 - min(step / anneal_steps, 1.0) if anneal_steps else 1.0
    return float(lr / (1 + delay) ** power)


class DelayScaledLR(torch.optim.lr_scheduler.LambdaLR):
    """:func:`lr_for_delay` as a scheduler: step it once an update.

    Args:
        optimizer: whose rates it lowers.
        delay: in updates.
        anneal_steps: as there.
    """

    def __init__(self, optimizer: Optimizer, delay: int, *, anneal_steps: int = 0) -> None:
        super().__init__(optimizer, lambda step: lr_for_delay(1.0, delay, step=step, anneal_steps=anneal_steps))
