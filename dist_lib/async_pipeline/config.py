"""What a delayed run is made of: one frozen dataclass for the runtime and for its single-process twin.

Both read the same object, so that a test, a lab and a checkpoint speak of the same run. It holds numbers only; the
modules, the loss and the optimizer are arguments of the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """How a pipeline accumulates, delays, clips and corrects.

    Attributes:
        micro_batches: m, equal parts of a batch along its rows, at least 1.
        delay: updates between the weights of a gradient and the weights it is applied to. 1: PipeDream-2BW, never
            flushed; 0: synchronous. A tuple, one delay a stage as in PipeDream, is for the emulator only.
        clip_norm: largest global gradient norm, over the parameters of all stages; None: no clipping.
        error_feedback: apply ``u + strength (u - u_prev)`` in place of the update u.
        ef_strength: that strength; 1 in the paper.
        ef_dtype: dtype in which ``u_prev`` is kept; None: that of the parameter.
        allow_edge: accept m = p - 1, the smallest m that works, where the update has no slack; otherwise m >= p.
        timeout_s: seconds that the runtime waits for another rank before it raises.

    Raises:
        ValueError: a value outside these ranges.
    """

    micro_batches: int
    delay: int | tuple[int, ...] = 1
    clip_norm: float | None = None
    error_feedback: bool = False
    ef_strength: float = 1.0
    ef_dtype: torch.dtype | None = None
    allow_edge: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}; it must be at least 1")
        delays = self.delay if isinstance(self.delay, tuple) else (self.delay,)
        if not delays or any(d < 0 for d in delays):
            raise ValueError(f"delay is {self.delay}; it must be 0 or more, or one such number for each stage")
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be positive and finite, or None for no clipping")
        if not math.isfinite(self.ef_strength) or self.ef_strength < 0:
            raise ValueError(f"ef_strength is {self.ef_strength}; it must be finite and not negative (the paper: 1)")
        if self.ef_dtype is not None and not self.ef_dtype.is_floating_point:
            raise ValueError(f"ef_dtype is {self.ef_dtype}; it must be a floating-point dtype, or None")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive")

    def delay_of(self, stage: int) -> int:
        """The delay of one stage.

        Raises:
            ValueError: the configuration lists too few delays.
        """
        if not isinstance(self.delay, tuple):
            return self.delay
        if stage >= len(self.delay):
            raise ValueError(f"delay lists {len(self.delay)} stages; there is none for stage {stage}")
        return self.delay[stage]


def check_micro_batches(config: AsyncConfig, stages: int) -> None:
    """Refuse fewer micro-batches than the delayed order of ``stages`` stages can run with.

    With m < p - 1 some forward would ask for weights that do not exist yet (derived from the order 1F1B); m >= p is
    the rule of PipeDream-2BW, and m = p - 1 must be asked for.

    Raises:
        ValueError: too small an m for a delay of 1, or a delay that is neither 0 nor 1.
    """
    m = config.micro_batches
    if config.delay not in (0, 1):
        raise ValueError(f"the runtime runs a delay of 0 or 1 for all stages, not {config.delay}: use the emulator")
    if config.delay == 0 or m >= stages or (m == stages - 1 and config.allow_edge):
        return
    if m == stages - 1:
        raise ValueError(
            f"micro_batches = {m} with {stages} stages leaves no time for the update; use at least {stages}, "
            "or set allow_edge=True to accept stalls"
        )
    raise ValueError(
        f"micro_batches = {m} with {stages} stages asks for weights that do not exist yet; use at least {stages} "
        f"({stages - 1} with allow_edge=True), or fewer stages"
    )
