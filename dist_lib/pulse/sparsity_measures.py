"""How much of a model changes in a step, counted on bits, and two models that predict it.

Sparsity S_k compares the end points of k steps after the cast that the forward pass uses: a cell that leaves and
returns counts as unchanged (arXiv:2602.03839, Def. A.2). Bits are compared, never values: 0.0 and -0.0 differ, a NaN
equals itself. The models are our derivation, one for each way to store parameters; which of the two a run follows
shows best in how S_k falls with k. Only torch and numpy are used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse.errors import StateError
from dist_lib.pulse.state import State, as_words, find_ties


@dataclass(frozen=True)
class ChangeCount:
    """Cells of one tensor, or of many: how many there are and how many of them changed."""

    cells: int
    changed: int

    @property
    def sparsity(self) -> float:
        """Share of unchanged cells, S; 1 for no cells at all."""
        return 1.0 - self.density

    @property
    def density(self) -> float:
        """Share of changed cells, 1 - S."""
        return self.changed / self.cells if self.cells else 0.0

    def __add__(self, other: ChangeCount) -> ChangeCount:
        return ChangeCount(self.cells + other.cells, self.changed + other.changed)


def count_changes(old: State, new: State) -> dict[str, ChangeCount]:
    """Count changed cells tensor by tensor; tied tensors count once, under the first of their names.

    Raises:
        StateError: the states differ in names, shapes or dtypes.
    """
    if set(old) != set(new):
        raise StateError(f"the states differ in names: {sorted(set(old) ^ set(new))[:5]}")
    counts = {}
    ties = find_ties(new)
    for name in sorted(new):
        a, b = old[name], new[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise StateError(f"{name!r} was {a.dtype} {tuple(a.shape)} and is {b.dtype} {tuple(b.shape)}")
        if name not in ties:
            x, y = as_words(a), as_words(b)
            counts[name] = ChangeCount(x.size, int(np.count_nonzero(x != y)))
    return counts


def total(counts: Mapping[str, ChangeCount]) -> ChangeCount:
    """Sum of counts over tensors."""
    return sum(counts.values(), ChangeCount(0, 0))


def sparsity(old: State, new: State) -> float:
    """S_1 (or S_k for states k steps apart): the share of cells whose bits are the same."""
    return total(count_changes(old, new)).sparsity


def by_layer(counts: Mapping[str, ChangeCount]) -> dict[str, ChangeCount]:
    """Sum counts by layer: ``layers.N`` for names that contain it, else the name without its last part."""
    layers: dict[str, ChangeCount] = {}
    for name, count in counts.items():
        parts = name.split(".")
        key = name.rpartition(".")[0] or name
        for i, part in enumerate(parts[:-1]):
            if part in ("layers", "h", "blocks") and parts[i + 1].isdigit():
                key = f"{part}.{parts[i + 1]}"
                break
        layers[key] = layers.get(key, ChangeCount(0, 0)) + count
    return layers


def cast_state(state: State, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A copy of ``state`` whose floating-point tensors wider than ``dtype`` are rounded to it, ties to even.

    Trainer, publisher and tests share this one cast. Tied tensors stay tied.
    """
    ties = find_ties(state)
    out: dict[str, Tensor] = {}
    for name in sorted(state):
        tensor = state[name].detach()
        wider = tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize
        out[name] = out[ties[name]] if name in ties else (tensor.to(dtype) if wider else tensor.clone())
    return {name: out[name] for name in state}


class SparsityRecorder:
    """Measures S_k for several k along a run, keeping the last ``max(ks)`` casts in memory.

    Args:
        ks: distances in steps, each at least 1.
        dtype: what states are cast to before they are compared.
    """

    def __init__(self, ks: Iterable[int] = (1, 2, 4, 8, 16, 32), dtype: torch.dtype = torch.bfloat16) -> None:
        self.ks = tuple(sorted(set(ks)))
        if not self.ks or self.ks[0] < 1:
            raise ValueError(f"ks must be positive step distances, not {self.ks}")
        self.dtype = dtype
        self.history: dict[int, list[float]] = {k: [] for k in self.ks}
        self._states: deque[dict[str, Tensor]] = deque(maxlen=self.ks[-1])

    def record(self, state: State) -> dict[int, float]:
        """Cast and keep ``state``; return S_k against the state k records ago, for each k that reaches so far."""
        now = cast_state(state, self.dtype)
        found = {k: sparsity(self._states[-k], now) for k in self.ks if k <= len(self._states)}
        for k, value in found.items():
            self.history[k].append(value)
        self._states.append(now)
        return found

    def mean(self, k: int) -> float:
        """Mean of S_k over the run so far; NaN before the first."""
        values = self.history[k]
        return sum(values) / len(values) if values else math.nan


def ulp(weight: Tensor) -> Tensor:
    """Spacing of bfloat16 at ``weight``, float32: 2^(e-7) for ``2^e <= |w| < 2^(e+1)``, 2^-133 for subnormals."""
    size = weight.detach().float().abs()
    exponent = torch.where(size == 0, -126, torch.frexp(size).exponent - 1)
    return torch.ldexp(torch.ones_like(size), exponent.clamp(min=-126) - 7)


def visible(theta: Tensor, step: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The compute-visible set: where the bits of cast(theta) and of cast(theta - step) differ (paper, Eq. 1).

    Args:
        theta: parameters, any shape, float32.
        step: what is subtracted from them, same shape.
        dtype: what the forward pass casts to.

    Returns:
        Boolean mask of the same shape.
    """
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return theta.to(dtype).view(word) != (theta - step).to(dtype).view(word)


def threshold_model(update: Tensor, weight: Tensor) -> float:
    """Predicted S_1 where parameters are stored in bfloat16: ``P(|u| <= ulp(w) / 2)``. Our derivation."""
    return float((update.detach().float().abs() <= ulp(weight) / 2).double().mean())


def crossing_model(update: Tensor, weight: Tensor) -> float:
    """Predicted S_1 under float32 masters: ``1 - mean min(1, |u| / ulp(w))``. Our derivation.

    A master is taken to lie anywhere in its rounding cell with equal chance, so it crosses the cell's edge with a
    chance proportional to the update.
    """
    return 1.0 - float((update.detach().float().abs() / ulp(weight)).clamp(max=1.0).double().mean())


def adam_bound(beta1: float, beta2: float) -> float:
    """Largest size of Adam's update over its learning rate, as the paper bounds it: sqrt((1-b1) / (1-b2)), b1 <= b2."""
    _check_betas(beta1, beta2)
    return math.sqrt((1 - beta1) / (1 - beta2))


def adam_bound_sharp(beta1: float, beta2: float, step: int | None = None) -> float:
    """The least such bound, by Cauchy-Schwarz (our derivation): 7.27 for (0.9, 0.999) in the limit, 1 at step 1.

    Args:
        beta1, beta2: decay rates of Adam's moments, ``beta1 <= beta2``.
        step: count of steps from 1, with bias correction; None for the limit.
    """
    _check_betas(beta1, beta2)
    ratio = beta1 * beta1 / beta2
    lead = (1 - beta1) ** 2 / (1 - beta2)
    if step is None:
        return math.sqrt(lead / (1 - ratio))
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    series = (1 - ratio**step) / (1 - ratio)
    return math.sqrt(lead * series * (1 - beta2**step)) / (1 - beta1**step)


def _check_betas(beta1: float, beta2: float) -> None:
    if not 0 <= beta1 <= beta2 < 1 or beta2 == 0:
        raise ValueError(f"the bound holds for 0 <= beta1 <= beta2 < 1, not ({beta1}, {beta2})")


def critical_weight(update: float) -> float:
    """Size below which a bfloat16 weight can move under ``|u| = update``: ``256 |u|`` (paper, Def. A.3 and Eq. 4)."""
    return 256.0 * abs(update)


def _entropy(counts: np.ndarray[Any, Any]) -> float:
    """Bits of ``sum(counts)`` independent symbols with these frequencies."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def reference_bits(old: Tensor, new: Tensor) -> float:
    """Bits that an ideal coder needs for the change of one bfloat16 tensor: a yardstick for codecs.

    Entropy of the change mask given the old exponent, plus that of the zigzagged differences of bit patterns
    without any context. A coder that uses more context can stay below it.

    Raises:
        StateError: not two bfloat16 tensors of one shape.
    """
    if old.dtype != torch.bfloat16 or new.dtype != torch.bfloat16 or old.shape != new.shape:
        raise StateError(f"two bfloat16 tensors of one shape are needed, not {old.dtype} and {new.dtype}")
    x, y = as_words(old), as_words(new)
    exponent = ((x >> 7) & 255).astype(np.int64)
    changed = np.flatnonzero(x != y)
    all_by, changed_by = np.bincount(exponent, minlength=256), np.bincount(exponent[changed], minlength=256)
    mask = sum(_entropy(np.array([a - c, c])) for a, c in zip(all_by, changed_by, strict=True))
    delta = (y[changed] - x[changed]).view(np.int16).astype(np.int64)
    return mask + _entropy(np.bincount(np.where(delta < 0, -2 * delta - 1, 2 * delta), minlength=1))
