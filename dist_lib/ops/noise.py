"""Uniform numbers from a seed and a position, the same on every device: the noise of stochastic rounding.

Counter based: the number of element i depends on the seed and on i alone, so a Triton kernel and plain torch draw the
same ones whatever the order. Two rounds of a 32-bit integer mixer. For rounding, not for cryptography or sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
SPREAD = 0x9E3779B9
MAX_SEED = 2**62


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32-bit integers, held in int64, whose output bits depend evenly on the input bits."""
    h = h ^ (h >> 16)
    h = (h * MULTIPLIERS[0]) & MASK
    h = h ^ (h >> 15)
    h = (h * MULTIPLIERS[1]) & MASK
    return h ^ (h >> 16)


def uniform(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Numbers ``start`` to ``start + count`` of the stream ``seed``: float32 in [0, 1), multiples of 2^-24."""
    index = torch.arange(start, start + count, device=device)
    low, high = index & MASK, index >> 32
    h = _mix(low ^ (seed & MASK))
    h = _mix(h ^ ((high * SPREAD + (seed >> 32)) & MASK))
    return (h >> 8).to(torch.float32) * 2.0**-24


def seed_from(generator: torch.Generator | int | None) -> int:
    """A seed: drawn from a generator, or the number given.

    Raises:
        ValueError: neither is given, or the number is not in 0 ... 2^62 - 1.
    """
    if generator is None:
        raise ValueError("stochastic rounding needs a generator: pass generator=torch.Generator() or a seed (int)")
    if isinstance(generator, torch.Generator):
        return int(torch.randint(MAX_SEED, (1,), generator=generator, device=generator.device).item())
    if not 0 <= generator < MAX_SEED:
        raise ValueError(f"seed {generator} is outside 0 ... 2^62 - 1")
    return generator
