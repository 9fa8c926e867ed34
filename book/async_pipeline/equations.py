"""Numbered equations of the asynchronous pipeline's chapter, each with an evaluation outside the library's own code.

Schedules are counted on grids of unit boxes, the optimizer is scalar arithmetic, and the stability limits come from the
roots of a polynomial instead of a companion matrix.
"""

from __future__ import annotations

import cmath

import torch

from dist_lib.async_pipeline import (
    AsyncConfig,
    DelayedTrainer,
    ErrorFeedback,
    StageTimes,
    make_schedule,
    simulate,
    stability_limit,
    version_of,
)
from dist_lib.async_pipeline.formulas import ideal_speedup, idle_share
from dist_lib.checks import Equation


def _idle_counted(name: str, p: int, m: int, batches: int) -> float:
    """Mean idle share of the stages of a simulated run, with a backward of one and a half forwards."""
    schedule = make_schedule(name, stages=p, micro_batches=m, batches=batches)
    run = simulate(schedule, StageTimes(forward_s=2.0, backward_s=3.0))
    return sum(run.idle_share(s) for s in range(p)) / p


def _speedup_counted(p: int, m: int) -> float:
    """Time of one more batch in a long flushed run, over the same without a flush."""
    times = StageTimes(forward_s=2.0, backward_s=3.0)

    def period(name: str) -> float:
        ends = [simulate(make_schedule(name, stages=p, micro_batches=m, batches=k), times).makespan_s for k in (20, 21)]
        return ends[1] - ends[0]

    return period("1f1b") / period("2bw")


class _Linear(torch.nn.Module):
    """One weight; with targets of zero and squared error its gradient is the weight times a known curvature."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _trained(start: float, lr: float, curvatures: list[float]) -> list[float]:
    """Weights after each update of a delayed run with plain SGD."""
    model = _Linear(start)
    trainer = DelayedTrainer(
        [model],
        loss_fn=lambda y, t: 0.5 * (y - t).square().mean(),
        make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=lr),
        config=AsyncConfig(micro_batches=1),
    )
    out = []
    for h in curvatures:
        trainer.train_batch(torch.tensor([[h**0.5]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
        out.append(float(trainer.parameters_by_stage()[0]["weight"].detach()))
    return out


def _recurrence(start: float, lr: float, curvatures: list[float]) -> list[float]:
    w = [start]
    for g, h in enumerate(curvatures):
        w.append(w[g] - lr * h * w[max(g - 1, 0)])
    return w[1:]


def _largest_root(beta: float, kappa: float) -> float:
    """Largest magnitude of the roots of z^2 - (1 + beta) z + beta + kappa (1 - beta)."""
    half, product = (1 + beta) / 2, beta + kappa * (1 - beta)
    root = cmath.sqrt(half * half - product)
    return max(abs(half + root), abs(half - root))


def _limit_by_roots(beta: float) -> float:
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _largest_root(beta, middle) < 1 else (low, middle)
    return low


class _Stream(torch.optim.Optimizer):
    """Applies given updates one after the other."""

    def __init__(self, parameter: torch.nn.Parameter, updates: list[float]) -> None:
        super().__init__([parameter], {"momentum": 0.9})
        self.updates, self.parameter = iter(updates), parameter

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.parameter.sub_(next(self.updates))


def _displacements(updates: list[float]) -> list[float]:
    """What ErrorFeedback subtracts in each step."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = ErrorFeedback(_Stream(parameter, updates))
    out, before = [], 0.0
    for _ in updates:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        out.append(before - float(parameter))
        before = float(parameter)
    return out


def _size_ratio(r: float) -> float:
    """Measured E|2u - u'|^2 / E|u|^2 through ErrorFeedback for updates of lag-one correlation r (first order)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5_000, generator=generator, dtype=torch.float64).tolist()
    u, updates = noise[0], []
    for n in noise:
        u = r * u + (1 - r * r) ** 0.5 * n
        updates.append(u)
    found = _displacements(updates)[1:]
    return sum(d * d for d in found) / sum(u * u for u in updates[1:])


SIZES = [(2, 2, 1), (4, 4, 1), (4, 8, 1), (8, 16, 1)]
UPDATES = [0.5, -0.2, 0.7, 0.1, -0.4]

EQUATIONS = [
    Equation(
        label="idle-flushed",
        latex=r"\text{idle} = \frac{p-1}{m+p-1}",
        implemented_by="dist_lib.async_pipeline.formulas.idle_share",
        evaluate=lambda p, m, k: _idle_counted("1f1b", p, m, k),
        library=lambda p, m, k: idle_share("1f1b", stages=p, micro_batches=m),
        samples=SIZES,
    ),
    Equation(
        label="idle-never-flushed",
        latex=r"\text{idle} = \frac{p-1}{K m+p-1}",
        implemented_by="dist_lib.async_pipeline.formulas.idle_share",
        evaluate=lambda p, m, k: _idle_counted("2bw", p, m, k),
        library=lambda p, m, k: idle_share("2bw", stages=p, micro_batches=m, batches=k),
        samples=[(2, 2, 5), (4, 4, 10), (4, 8, 3)],
    ),
    Equation(
        label="speedup",
        latex=r"\frac{\text{time with a flush}}{\text{time without}} = \frac{m+p-1}{m}",
        implemented_by="dist_lib.async_pipeline.formulas.ideal_speedup",
        evaluate=_speedup_counted,
        library=lambda p, m: ideal_speedup(stages=p, micro_batches=m),
        samples=[(2, 2), (4, 4), (4, 8)],
    ),
    Equation(
        label="version",
        latex=r"v(g) = \max(g-1,\, 0)",
        implemented_by="dist_lib.async_pipeline.version_of",
        evaluate=lambda g: g - 1 if g > 1 else 0,
        library=version_of,
        samples=[(2,), (3,), (10,)],
        rtol=0.0,
    ),
    Equation(
        label="update",
        latex=r"W_{g+1} = W_g - u_g, \quad u_g \text{ from } G_g = \frac1m \sum_{j<m} \nabla \ell_{g,j}(W_{v(g)})",
        implemented_by="dist_lib.async_pipeline.DelayedTrainer",
        evaluate=_recurrence,
        library=_trained,
        samples=[(1.0, 0.1, [1.0, 2.0, 0.5, 3.0, 1.5]), (-2.0, 0.3, [0.7, 0.7, 0.7, 0.7])],
        rtol=1e-12,
    ),
    Equation(
        label="clip-slack",
        latex=r"m - p + 1",
        implemented_by="dist_lib.async_pipeline.simulate",
        evaluate=lambda p, m: m - p + 1,
        library=lambda p, m: (
            simulate(
                make_schedule("2bw", stages=p, micro_batches=m, batches=6), StageTimes(forward_s=1.0, backward_s=2.0)
            ).clip_slack_periods
        ),
        samples=[(2, 2), (4, 4), (4, 8), (8, 11)],
        rtol=1e-9,
    ),
    Equation(
        label="limit-sync",
        latex=r"\kappa < \frac{2(1+\beta)}{1-\beta}",
        implemented_by="dist_lib.async_pipeline.stability_limit",
        evaluate=lambda beta: 2 * (1 + beta) / (1 - beta),
        library=lambda beta: stability_limit(beta, delay=0),
        samples=[(0.0,), (0.8,), (0.9,), (0.98,)],
        rtol=1e-6,
    ),
    Equation(
        label="polynomial-delay",
        latex=r"z^2 - (1+\beta)\, z + \beta + \kappa(1-\beta) = 0",
        implemented_by="dist_lib.async_pipeline.stability_limit",
        evaluate=_limit_by_roots,
        library=lambda beta: stability_limit(beta, delay=1),
        samples=[(0.5,), (0.9,), (0.95,)],
        rtol=1e-6,
    ),
    Equation(
        label="displacement",
        latex=r"d_1 = u_1, \qquad d_n = u_n + (u_n - u_{n-1}) \quad (n \ge 2)",
        implemented_by="dist_lib.async_pipeline.ErrorFeedback",
        evaluate=lambda *u: [u[0], *(2 * u[n] - u[n - 1] for n in range(1, len(u)))],
        library=lambda *u: _displacements(list(u)),
        samples=[tuple(UPDATES)],
        rtol=1e-12,
    ),
    Equation(
        label="telescope",
        latex=r"\sum_{k=1}^{n} d_k = \sum_{k=1}^{n} u_k + u_n - u_1",
        implemented_by="dist_lib.async_pipeline.ErrorFeedback",
        evaluate=lambda *u: sum(u) + u[-1] - u[0],
        library=lambda *u: sum(_displacements(list(u))),
        samples=[tuple(UPDATES), tuple(UPDATES[:2])],
        rtol=1e-12,
    ),
    Equation(
        label="noise",
        latex=r"\frac{\mathrm{E}\lVert 2u_n - u_{n-1}\rVert^2}{\mathrm{E}\lVert u_n\rVert^2} = 5 - 4r",
        implemented_by="dist_lib.async_pipeline.ErrorFeedback",
        evaluate=lambda r: 5 - 4 * r,
        library=_size_ratio,
        samples=[(0.0,), (0.75,), (0.95,)],
        rtol=0.05,
    ),
]
