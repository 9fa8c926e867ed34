"""Numbered equations of the Muon chapter, each with an evaluation that does not pass through the library's own code.

The evaluations work in float64 with plain singular values or scalars, so that a wrong sign, a missing transpose or a
swapped coefficient in the library shows up as a difference.
"""

from __future__ import annotations

import torch

from dist_lib.checks import Equation
from dist_lib.ops import newton_schulz, newton_schulz_flops, normalise, polar_express, scalar_map, with_safety
from dist_lib.optim import Muon

TRIPLE = (3.4445, -4.775, 2.0315)


def _wide(seed: int, rows: int = 6, cols: int = 10) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def _through_svd(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The iteration carried out on singular values in float64."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    a, b, c = TRIPLE
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


def _on_the_matrix(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The iteration written out with matrix products in float64."""
    x = x.double() / x.double().square().sum().sqrt()
    a, b, c = TRIPLE
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def _gram(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The Gram recursion in float64, without restarts."""
    x = x.double() / x.double().square().sum().sqrt()
    a, b, c = TRIPLE
    gram, q = x @ x.T, torch.eye(x.shape[0], dtype=torch.float64)
    for _ in range(steps):
        p = a * torch.eye(x.shape[0], dtype=torch.float64) + b * gram + c * gram @ gram
        q, gram = p @ q, p @ gram @ p
    return q @ x


def _library(x: torch.Tensor, steps: int, form: str) -> torch.Tensor:
    return newton_schulz(x, steps=steps, coefficients=[TRIPLE] * steps, form=form).double()


def _scalar(x: float, steps: int) -> float:
    a, b, c = TRIPLE
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    return x


def _extremes(lower: float) -> list[float]:
    """Deviations from 1 of the first step: at both ends and at the two inner extrema, found on a fine grid."""
    a, b, c = polar_express(1, lower=lower, cushion=0.0)[0]
    grid = torch.linspace(lower, 1, 400_001, dtype=torch.float64)
    error = 1 - (a * grid + b * grid**3 + c * grid**5)
    inner = error[1:-1]
    return [float(error[0]), float(inner.min()), float(inner.max()), float(error[-1])]


def _alternating(lower: float) -> list[float]:
    a, b, c = polar_express(1, lower=lower, cushion=0.0)[0]
    largest = 1 - (a * lower + b * lower**3 + c * lower**5)
    return [largest, -largest, largest, -largest]


def _flops_direct(m: int, n: int, k: int) -> int:
    return k * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)


def _flops_gram(m: int, n: int, k: int, f: int) -> int:
    return (f + 1) * 4 * m * m * n + 2 * (4 * k - 3 * f - 3) * m**3


def _momentum(gradients: list[float], mu: float) -> list[float]:
    """Buffers of the recurrence for scalars, as a sum instead of a loop."""
    return [sum(mu ** (t - i) * g for i, g in enumerate(gradients[: t + 1])) for t in range(len(gradients))]


def _muon_buffers(gradients: list[float], mu: float) -> list[float]:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([parameter], lr=0.1, momentum=mu)
    out = []
    for g in gradients:
        parameter.grad = torch.full((2, 2), g)
        optimizer.step()
        out.append(float(next(iter(optimizer.state[parameter].values())).mean()))
    return out


def _updated(seed: int, lr: float, decay: float) -> torch.Tensor:
    """One step from known momentum, written out: Nesterov, polar factor by singular values, scale, decay."""
    weight, gradient = _wide(seed), _wide(seed + 1)
    nesterov = gradient + 0.95 * gradient
    u, s, vt = torch.linalg.svd(nesterov.double(), full_matrices=False)
    mapped = torch.from_numpy(scalar_map((s / s.norm()).numpy(), with_safety(polar_express(5), 1.05)))
    scale = 0.2 * max(weight.shape) ** 0.5
    return weight.double() * (1 - lr * decay) - lr * scale * (u @ torch.diag(mapped) @ vt)


def _muon_step(seed: int, lr: float, decay: float) -> torch.Tensor:
    parameter = torch.nn.Parameter(_wide(seed))
    parameter.grad = _wide(seed + 1)
    Muon([parameter], lr=lr, weight_decay=decay, momentum=0.95, nesterov=True, scale="match_rms_adamw").step()
    return parameter.detach()


def _rms_of_orthogonal(m: int, n: int) -> float:
    wide = torch.randn(m, n, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(wide, full_matrices=False)
    return float((u @ vt).square().mean().sqrt())


EQUATIONS = [
    Equation(
        "normalise",
        r"X_0 = \frac{Y}{\lVert Y\rVert_F}, \qquad Y = \frac{N}{\max_{ij} |N_{ij}|}",
        "dist_lib.ops.normalise",
        lambda seed, scale: _wide(seed).double() / _wide(seed).double().norm(),
        lambda seed, scale: normalise((_wide(seed) * scale)[None])[0],
        [(0, 1.0), (1, 2.0**-100), (2, 2.0**100)],
    ),
    Equation(
        "iteration",
        r"X_{i+1} = a_i X_i + b_i \, (X_i X_i^\top) X_i + c_i \, (X_i X_i^\top)^2 X_i",
        "dist_lib.ops.newton_schulz",
        _on_the_matrix,
        lambda x, steps: _library(x, steps, "direct"),
        [(_wide(0), 1), (_wide(1), 5), (_wide(2, 7, 7), 3)],
    ),
    Equation(
        "scalar",
        r"\sigma \mapsto p(\sigma) = a\sigma + b\sigma^3 + c\sigma^5",
        "dist_lib.ops.scalar_map",
        _scalar,
        lambda x, steps: scalar_map(x, [TRIPLE] * steps),
        [(0.01, 1), (0.3, 5), (1.0, 3)],
    ),
    Equation(
        "equioscillation",
        r"1 - p(\ell) = -(1 - p(q)) = 1 - p(r) = -(1 - p(u)), \qquad \ell < q < r < u",
        "dist_lib.ops.polar_express",
        _alternating,
        _extremes,
        [(0.05,), (0.2,), (0.5,)],
        rtol=1e-6,
    ),
    Equation(
        "safety",
        r"(a, b, c) \rightarrow \left(\frac{a}{s}, \frac{b}{s^3}, \frac{c}{s^5}\right)",
        "dist_lib.ops.with_safety",
        lambda x, s: _scalar(x / s, 1),
        lambda x, s: scalar_map(x, with_safety([TRIPLE], s)),
        [(0.2, 1.05), (0.9, 1.02)],
    ),
    Equation(
        "gram",
        r"P_i = a_i I + b_i G_i + c_i G_i^2, \qquad G_{i+1} = P_i G_i P_i, \qquad X_k = P_{k-1} \cdots P_0 X_0",
        "dist_lib.ops.newton_schulz",
        _gram,
        lambda x, steps: _library(x, steps, "gram"),
        [(_wide(3), 2), (_wide(4), 5)],
        rtol=1e-4,
    ),
    Equation(
        "flops-direct",
        r"F_\text{direct} = k\,(4 m^2 n + 2 m^3)",
        "dist_lib.ops.newton_schulz_flops",
        _flops_direct,
        lambda m, n, k: newton_schulz_flops(m, n, steps=k, form="direct"),
        [(3, 8, 5), (2048, 22016, 5), (4, 4, 1)],
        rtol=0.0,
    ),
    Equation(
        "flops-gram",
        r"F_\text{Gram} = (f + 1)\, 4 m^2 n + (4k - 3f - 3)\, 2 m^3",
        "dist_lib.ops.newton_schulz_flops",
        _flops_gram,
        lambda m, n, k, f: newton_schulz_flops(m, n, steps=k, form="gram", restarts=range(1, f + 1)),
        [(3, 8, 5, 1), (2048, 22016, 5, 1), (6, 9, 5, 0), (4, 8, 7, 2)],
        rtol=0.0,
    ),
    Equation(
        "momentum",
        r"B_t = \mu B_{t-1} + g_t, \qquad N_t = g_t + \mu B_t",
        "dist_lib.optim.Muon",
        _momentum,
        _muon_buffers,
        [([1.0, -2.0, 0.5], 0.9), ([3.0, 3.0], 0.95)],
        rtol=1e-6,
    ),
    Equation(
        "update",
        r"W_{t+1} = (1 - \eta\lambda)\, W_t - \eta \, s(\text{rows}, \text{cols}) \, \mathrm{NS}(N_t)",
        "dist_lib.optim.Muon",
        _updated,
        _muon_step,
        [(0, 0.1, 0.0), (5, 0.02, 0.3)],
        rtol=1e-4,
    ),
    Equation(
        "update-rms",
        r"\mathrm{RMS}(UV^\top) = \sqrt{\frac{\min(m, n)}{m n}} = \frac{1}{\sqrt{\max(m, n)}}",
        "dist_lib.optim.update_scale",
        lambda m, n: 1 / max(m, n) ** 0.5,
        _rms_of_orthogonal,
        [(5, 9), (16, 4), (7, 7)],
    ),
]
