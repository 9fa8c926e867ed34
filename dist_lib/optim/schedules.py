"""Learning-rate schedules as factors for ``torch.optim.lr_scheduler.LambdaLR``: one definition for every lab."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(*, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Callable[[int], float]:
    """Linear warm-up to 1, then half a cosine down to ``final``, which it keeps after ``total_steps``.

    The first step already has a factor above 0: ``1 / (warmup_steps + 1)``.

    Args:
        total_steps: steps of the run.
        warmup_steps: of them, before the factor is 1.
        final: last factor, from 0 to 1.

    Returns:
        Factor of a step counted from 0.

    Raises:
        ValueError: arguments out of range.
    """
    if total_steps < 1 or not 0 <= warmup_steps < total_steps or not 0.0 <= final <= 1.0:
        raise ValueError(
            f"total_steps {total_steps}, warmup_steps {warmup_steps}, final {final}: need at least 1 step, a warm-up "
            f"shorter than the run, and a final factor from 0 to 1"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
