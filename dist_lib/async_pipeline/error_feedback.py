"""Error feedback on updates: what one step of gradient delay needs, around any optimizer with momentum.

With a delay of one, the update that arrives was built from the gradient one version back. The correction (One-Step
Gradient Delay, arXiv 2606.30634, section 3) applies each update together with its difference from the one before:

    x_{t+1} = x_t - (2 u_{t-1} - u_{t-2})

where u is the whole displacement that the optimizer would have made: learning rate, preconditioner, momentum and
decoupled weight decay included. Equivalently (our derivation), with y_t = x_t + u_{t-2}, y follows the plain
optimizer, and the weights x are y moved ahead by the last known update. It acts on updates, not on gradients: see
``mitigations.GradientExtrapolation`` for that look-alike, which is another method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.wrapping import MOMENTUM_OPTIONS, OptimizerWrapper, momentum_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FIRST_UPDATE = "uncorrected"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype differences of weights are taken: float32 for half types, otherwise their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class ErrorFeedback(OptimizerWrapper):
    """Apply ``u + strength (u - u_previous)`` in place of the optimizer's update ``u``, and remember ``u``.

    The optimizer steps first, so its moments advance exactly once, at the newest weights, and its weight decay is
    part of ``u``. ``u`` is read off as weights before minus weights after, in the parameter's dtype (float32 for half
    types): it carries the rounding of that subtraction, an error of up to one unit in the last place of the weight, and
    is the displacement that was really made. Keep float32 master weights where updates are small.

    A parameter's first update is applied as it is. A parameter without a gradient is left alone and its remembered
    update becomes zero. A step that the optimizer skips by itself (``skipped_steps`` counts up, as with
    ``nonfinite="skip"`` of :class:`~dist_lib.optim.Muon`) changes nothing here either.

    Memory: one remembered update a parameter, and one more copy of the updated parameters while a step runs.

    Args:
        optimizer: the inner optimizer, already made.
        strength: lambda; 1 in the paper, 0 switches the correction off.
        dtype: of the remembered updates; None means that of the parameter, float32 for half types.
        allow_momentum_free: also wrap optimizers without momentum. Their updates have no memory, so the last one does
            not foretell the next: on a quadratic the stable step size falls from 1 to 0.618 (our derivation), and
            the variance of the updates grows fivefold. Momentum is recognised by the names of the group's options
            (:func:`~dist_lib.async_pipeline.wrapping.momentum_of`); a group without any of them counts as free of it.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: a group without momentum, a negative strength, or a dtype that is not a floating-point one.

    Attributes:
        strength, dtype: as given, or as loaded: they belong to the checkpoint.
        active: set it to False while gradients are not delayed yet: the optimizer then steps as if it were alone, and
            nothing is remembered, so the first update after the switch counts as the first. Saved with the rest.
    """

    STATE_KEY = "error_feedback"

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        strength: float = 1.0,
        dtype: torch.dtype | None = None,
        allow_momentum_free: bool = False,
    ) -> None:
        if not 0.0 <= strength < float("inf"):
            raise ValueError(f"strength = {strength}: it must be finite and at least 0; the paper uses 1")
        if dtype is not None and dtype not in DTYPES.values():
            raise ValueError(f"dtype = {dtype}: it must be None or one of {', '.join(DTYPES)}")
        super().__init__(optimizer)
        self.strength, self.dtype, self.allow_momentum_free = float(strength), dtype, allow_momentum_free
        self.active = True
        self._previous: dict[Tensor, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            self._check_momentum(group, f"group {index}")

    def _check_momentum(self, group: Mapping[str, Any], name: str) -> None:
        if self.allow_momentum_free:
            return
        momentum = momentum_of(group)
        if momentum is None or momentum <= 0.0:
            found = "no option " + ", ".join(MOMENTUM_OPTIONS) if momentum is None else f"momentum {momentum:g}"
            raise ValueError(
                f"{type(self.optimizer).__name__}, {name}, has {found}. Error feedback predicts the next update by the "
                f"last, and without momentum it makes training less stable: give the optimizer momentum, or set "
                f"allow_momentum_free=True to see"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its parameters start with an uncorrected update.

        Raises:
            ValueError: a group without momentum, or one that the inner optimizer refuses.
        """
        if self._built:
            self._check_momentum({**self.optimizer.defaults, **param_group}, "the new group")
        super().add_param_group(param_group)

    def previous_update(self, parameter: Tensor) -> Tensor | None:
        """The remembered update of a parameter: before any correction, None before the first. Do not write into it."""
        return self._previous.get(parameter)

    def _step_inner(self, updated: list[Tensor]) -> None:
        if not self.active:
            self._previous.clear()
            self.optimizer.step()
            return
        before = [p.detach().clone(memory_format=torch.preserve_format) for p in updated]
        skipped = getattr(self.optimizer, "skipped_steps", 0)
        self.optimizer.step()
        if getattr(self.optimizer, "skipped_steps", 0) != skipped:
            return
        with_gradient = set(map(id, updated))
        for p, previous in self._previous.items():
            if id(p) not in with_gradient:
                previous.zero_()
        plain = [i for i, p in enumerate(updated) if self._is_plain(p)]
        self._correct_together([updated[i] for i in plain], [before[i] for i in plain])
        for i in sorted(set(range(len(updated))) - set(plain)):
            self._correct(updated[i], before[i])

    def _is_plain(self, p: Tensor) -> bool:
        """Whether its differences, and the remembered one, are in its own dtype, so that no conversion is needed."""
        return p in self._previous and self._previous[p].dtype == p.dtype == wide_dtype(p.dtype)

    def _correct_together(self, parameters: list[Tensor], before: list[Tensor]) -> None:
        """:meth:`_correct` for many, in few launches on a GPU and with no temporary."""
        if not parameters:
            return
        previous = [self._previous[p] for p in parameters]
        torch._foreach_sub_(before, parameters)  # u
        torch._foreach_sub_(previous, before)  # previous - u
        torch._foreach_add_(parameters, previous, alpha=self.strength)
        torch._foreach_copy_(previous, before)

    def _correct(self, p: Tensor, before: Tensor) -> None:
        wide = wide_dtype(p.dtype)
        update = before.to(wide) - p.to(wide)
        previous = self._previous.get(p)
        if previous is None:
            self._previous[p] = update.to(self.dtype or wide)
            return
        p.copy_(p.to(wide) + self.strength * (previous.to(wide) - update))
        previous.copy_(update)

    def _extra_state(self) -> dict[str, Any]:
        name = next((n for n, d in DTYPES.items() if d == self.dtype), None)
        return {
            "strength": self.strength,
            "active": self.active,
            "dtype": name,
            "first_update": FIRST_UPDATE,
            "previous": self._indexed(self._previous),
        }

    def _check_extra_state(self, extra: Mapping[str, Any]) -> None:
        if extra["first_update"] != FIRST_UPDATE or extra["dtype"] not in (None, *DTYPES):
            raise ValueError(
                f"saved with first_update = {extra['first_update']!r} and dtype = {extra['dtype']!r}; this version "
                f"knows {FIRST_UPDATE!r}, and None or {', '.join(DTYPES)}"
            )
        self._check_indexed(extra["previous"], "update")

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self.strength, self.active = float(extra["strength"]), bool(extra["active"])
        self.dtype = DTYPES[extra["dtype"]] if extra["dtype"] is not None else None
        parameters = self.parameters
        self._previous = {}
        for index, tensor in extra["previous"].items():
            p = parameters[index]
            dtype = self.dtype or wide_dtype(p.dtype)
            self._previous[p] = tensor.detach().to(device=p.device, dtype=dtype, copy=True)


def configured(optimizer: Optimizer, config: AsyncConfig) -> Optimizer:
    """The optimizer of a stage as the configuration wants it: wrapped if ``error_feedback`` is set, else as it is.

    Raises:
        ValueError: it is wrapped already, or has no momentum (wrap it yourself with ``allow_momentum_free=True`` and
            leave ``error_feedback`` off).
    """
    if not config.error_feedback:
        return optimizer
    if isinstance(optimizer, ErrorFeedback):
        raise ValueError("the optimizer has error feedback already: set error_feedback=False, or do not wrap it")
    return ErrorFeedback(optimizer, strength=config.ef_strength, dtype=config.ef_dtype)
