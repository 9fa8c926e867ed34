"""Delay on one quadratic mode: exactly solvable, and enough to predict which optimizer suffers.

The loss is ``h x^2 / 2``; ``kappa = lr * h`` (for an adaptive method h is the preconditioned curvature). Momentum is an
average, ``m = beta m + (1 - beta) g``, and the update is ``lr m``, or ``lr (beta m + (1 - beta) g)`` with Nesterov's
read-out. The gradient is taken ``delay`` updates ago; error feedback applies ``u + strength (u - u_prev)`` instead of
``u``. All of it is a linear recursion, so stability is a matter of eigenvalues and the spread under noise solves a
linear equation. This account is our derivation; it is not the theory of the paper (arXiv 2606.30634), which proves
convergence and says nothing of these limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One quadratic mode under an optimizer with momentum.

    Attributes:
        beta: momentum, 0 to below 1.
        nesterov: read the momentum out with Nesterov's look-ahead.
        delay: updates between the weights a gradient is taken at and those it is applied to; 0 is synchronous.
        error_feedback: the strength of error feedback; ``False`` or 0 is none, ``True`` or 1 the paper's.

    Raises:
        ValueError: a value outside these ranges.
    """

    beta: float
    nesterov: bool = False
    delay: int = 1
    error_feedback: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: momentum is at least 0 and below 1")
        if isinstance(self.delay, bool) or self.delay < 0 or self.delay != int(self.delay):
            raise ValueError(f"delay={self.delay}: give a whole number of updates, at least 0")
        if not 0 <= self.error_feedback < np.inf:
            raise ValueError(f"error_feedback={self.error_feedback}: give a strength of at least 0; 1 is the paper's")
        object.__setattr__(self, "error_feedback", float(self.error_feedback))

    def polynomial(self, kappa: float) -> Array:
        """Coefficients, highest power first, of the polynomial whose roots multiply the error in each step.

        ``(z - 1)(z - beta) z^(d + e) + kappa (1 - beta) N(z) E(z)`` with ``N(z) = z``, or ``(1 + beta) z - beta`` with
        Nesterov; ``E(z) = (1 + s) z - s`` and ``e = 1`` with error feedback of strength s, else 1 and 0.
        """
        s, beta = self.error_feedback, self.beta
        read = np.array([1.0 + beta, -beta] if self.nesterov else [1.0, 0.0])
        fed = kappa * (1.0 - beta) * (np.convolve(read, [1.0 + s, -s]) if s else read)
        whole = np.zeros(3 + self.delay + (1 if s else 0))
        whole[:3] = 1.0, -(1.0 + beta), beta
        whole[-len(fed) :] += fed
        return whole

    def growth(self, kappa: float) -> float:
        """The factor by which the error grows in each step in the end: the largest root's modulus."""
        return float(np.abs(np.roots(self.polynomial(kappa))).max())


def stability_limit(
    beta: float, nesterov: bool = False, delay: int = 1, error_feedback: float = 0.0, *, tolerance: float = 1e-9
) -> float:
    """The ``kappa = lr * h`` from which on the mode no longer converges, by eigenvalues and bisection.

    Args:
        beta, nesterov, delay, error_feedback: see ``Mode``.
        tolerance: relative width at which the bisection stops.

    Returns:
        The end of the stable interval that begins at 0; ``2 (1 + beta) / (1 - beta)`` without delay or look-ahead.

    Raises:
        ValueError: as for ``Mode``.
    """
    mode = Mode(beta=beta, nesterov=nesterov, delay=delay, error_feedback=error_feedback)
    low, high = 0.0, 1.0 / 64
    while mode.growth(high) < 1.0:
        low, high = high, 1.2 * high
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if mode.growth(middle) < 1.0 else (low, middle)
    return low


def simulate_quadratic(
    kappa: float,
    beta: float,
    *,
    nesterov: bool = False,
    delay: int = 1,
    error_feedback: float = 0.0,
    steps: int = 400,
    start: float = 1.0,
    noise: float = 0.0,
    seed: int = 0,
) -> Array:
    """Follow the mode step by step, as the pipeline would: no gradient is older than the start.

    Args:
        kappa: learning rate times curvature (the curvature is 1, the learning rate ``kappa``).
        beta, nesterov, delay, error_feedback: see ``Mode``. The first update is not corrected.
        steps: number of updates.
        start: the initial weight.
        noise: standard deviation of the gradient noise.
        seed: of the noise.

    Returns:
        float64 array of ``steps + 1`` weights, newest version each; ``inf`` after an overflow.

    Raises:
        ValueError: as for ``Mode``, or fewer than one step.
    """
    mode = Mode(beta=beta, nesterov=nesterov, delay=delay, error_feedback=error_feedback)
    if steps < 1:
        raise ValueError(f"steps={steps}: give at least 1")
    noises = noise * np.random.default_rng(seed).standard_normal(steps)
    strength, path = mode.error_feedback, [float(start)]
    momentum, previous = 0.0, None
    for g in range(steps):
        gradient = path[max(g - delay, 0)] + float(noises[g])
        momentum = beta * momentum + (1.0 - beta) * gradient
        update = kappa * (beta * momentum + (1.0 - beta) * gradient if nesterov else momentum)
        step = update if previous is None else update + strength * (update - previous)
        path.append(path[-1] - step)
        previous = update
        if not abs(path[-1]) < 1e150:
            path += [np.inf] * (steps + 1 - len(path))
            break
    return np.asarray(path)


def stationary_second_moment(
    kappa: float, beta: float, *, nesterov: bool = False, delay: int = 1, error_feedback: float = 0.0
) -> float:
    """``E[x^2]`` in the long run under gradient noise of variance 1, exactly.

    The state ``(x_t .. x_{t-d}, m, u_prev)`` obeys ``s' = A s + b n``; its covariance solves ``P = A P A' + b b'``.

    Returns:
        The variance for curvature 1; ``inf`` if the mode is unstable.

    Raises:
        ValueError: as for ``Mode``.
    """
    mode = Mode(beta=beta, nesterov=nesterov, delay=delay, error_feedback=error_feedback)
    if mode.growth(kappa) >= 1.0:
        return float("inf")
    size, s = delay + 3, mode.error_feedback
    at_momentum, at_update = delay + 1, delay + 2
    identity = np.eye(size)
    gradient = identity[delay]  # this row of the state, plus the noise
    momentum = beta * identity[at_momentum] + (1.0 - beta) * gradient
    momentum_noise = 1.0 - beta
    update, update_noise = momentum, momentum_noise
    if nesterov:
        update = beta * momentum + (1.0 - beta) * gradient
        update_noise = beta * momentum_noise + 1.0 - beta
    update, update_noise = kappa * update, kappa * update_noise
    matrix, drive = np.zeros((size, size)), np.zeros(size)
    matrix[0] = identity[0] - (1.0 + s) * update + s * identity[at_update]
    drive[0] = -(1.0 + s) * update_noise
    for k in range(delay):
        matrix[k + 1] = identity[k]
    matrix[at_momentum], drive[at_momentum] = momentum, momentum_noise
    matrix[at_update], drive[at_update] = update, update_noise
    system = np.eye(size * size) - np.kron(matrix, matrix)
    return float(np.linalg.solve(system, np.outer(drive, drive).ravel())[0])
