"""Coefficients of the odd quintics that Newton-Schulz iterates, and the recipe that computes them.

One step maps a singular value ``x`` to ``a x + b x^3 + c x^5``. A set is a sequence of triples ``(a, b, c)``, one a
step. Published sets are in :data:`COEFFICIENTS`; :func:`polar_express` computes a set for any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch

Triple = tuple[float, float, float]
Coefficients = str | Sequence[Triple]

KELLER: Triple = (3.4445, -4.7750, 2.0315)
_YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# The two parameter choices in use: as published, and with the margin that Dion and nanochat take.
_PUBLISHED = {"cushion": 0.02407327424182761, "safety": 1.0}
_DION = {"cushion": 0.02, "safety": 1.02}
DMUON_SAFETY = 1.05


def scalar_map(x: np.ndarray | float, triples: Sequence[Triple]) -> np.ndarray:
    """What the iteration does to a singular value, in float64; any shape."""
    value = np.asarray(x, dtype=np.float64)
    for a, b, c in triples:
        square = value * value
        value = value * (a + square * (b + c * square))
    return value


def _minimax_quintic(lower: float, upper: float) -> Triple:
    """The odd quintic whose largest distance from 1 on [lower, upper] is smallest.

    Remez exchange: the error takes its extreme value, with alternating sign, at ``lower``, two inner points and
    ``upper``. Solve for coefficients and error, move the inner points to the extrema, repeat.
    """
    if upper - lower < 1e-4 * upper:  # nearly a point: value 1, two vanishing derivatives
        x = upper
        return (15 / 8 / x, -10 / 8 / x**3, 3 / 8 / x**5)
    q, r = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    a = b = c = error = 0.0
    for _ in range(100):
        points = np.array([lower, q, r, upper])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        a, b, c, new_error = (float(v) for v in np.linalg.solve(system, np.ones(4)))
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        if abs(new_error - error) < 1e-15:
            break
        error = new_error
    return a, b, c


@lru_cache(maxsize=64)
def polar_express(
    steps: int, *, lower: float = 1e-3, cushion: float = _PUBLISHED["cushion"], safety: float = 1.0
) -> tuple[Triple, ...]:
    """Coefficients that are best, step after step, for singular values in [``lower``, 1].

    Each step is the minimax quintic on the interval that the step before left; ``cushion`` bounds from below the
    interval that it is solved on, so that the polynomials stay tame; ``safety`` shrinks the argument of every step
    but the last against values that rounding pushed above the interval.

    Args:
        steps: at least 1.
        lower: smallest singular value (after normalising) that is promised to be lifted.
        cushion: 0 for none.
        safety: at least 1.

    Raises:
        ValueError: an argument out of range.

    Source: Polar Express (arXiv 2505.16932), in the form of its public recipe.
    """
    if steps < 1 or not 0 < lower < 1 or not 0 <= cushion < 1 or safety < 1:
        raise ValueError(
            f"steps {steps}, lower {lower}, cushion {cushion}, safety {safety}: need steps >= 1, 0 < lower < 1, "
            "0 <= cushion < 1 and safety >= 1"
        )
    low, high, out = lower, 1.0, []
    for step in range(steps):
        a, b, c = _minimax_quintic(max(low, cushion * high), high)
        if cushion * high > low:  # centre the image of the whole interval around 1
            ends = float(scalar_map(low, [(a, b, c)]) + scalar_map(high, [(a, b, c)]))
            a, b, c = 2 * a / ends, 2 * b / ends, 2 * c / ends
        s = safety if step < steps - 1 else 1.0
        a, b, c = a / s, b / s**3, c / s**5
        out.append((a, b, c))
        low = float(scalar_map(low, [(a, b, c)]))
        high = 2 - low
    return tuple(out)


def with_safety(triples: Sequence[Triple], safety: float) -> tuple[Triple, ...]:
    """Shrink the argument of every step, the last included, by ``safety`` (as DMuon does with 1.05)."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in triples)


def _shrink_first(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """The same iteration on an input divided by ``factor``: Dion divides by 1.02 times the norm."""
    return (*with_safety(triples[:1], factor), *triples[1:])


def _sets(steps: int) -> dict[str, tuple[Triple, ...]]:
    raw = polar_express(steps, **_PUBLISHED)
    return {
        "keller": (KELLER,) * steps,
        "polar_express_raw": raw,
        "polar_express": with_safety(raw, DMUON_SAFETY),
        "polar_express_dion": _shrink_first(polar_express(steps, **_DION), _DION["safety"]),
    }


COEFFICIENTS: Mapping[str, str] = MappingProxyType(
    {
        "keller": "one triple in every step (Keller Jordan)",
        "you": "five varying triples (You); 1 to 5 steps",
        "polar_express_raw": "Polar Express as published",
        "polar_express": "Polar Express with a safety factor of 1.05 in every step (DMuon's default, and ours)",
        "polar_express_dion": "Polar Express with safety 1.02 and cushion 0.02 (Dion, nanochat)",
    }
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def resolve(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Triples of a named set, or a given sequence checked.

    Raises:
        ValueError: an unknown name, a number of triples other than ``steps``, or numbers that are not finite.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}: it must be at least 1")
    if isinstance(coefficients, str):
        if coefficients == "you":
            if steps > len(_YOU):
                raise ValueError(f"coefficients 'you' has {len(_YOU)} steps, {steps} were asked for")
            return _YOU[:steps]
        if coefficients not in COEFFICIENTS:
            raise ValueError(f"coefficients {coefficients!r}: allowed are {', '.join(COEFFICIENTS)}, or triples")
        return _sets(steps)[coefficients]
    triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    if len(triples) != steps or not all(math.isfinite(v) for t in triples for v in t):
        raise ValueError(f"got {len(triples)} triples for {steps} steps; need one finite triple a step")
    return triples
