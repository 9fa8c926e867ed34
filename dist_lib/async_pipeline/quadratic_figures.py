"""Pictures of the delay on one quadratic mode: where it stops converging, and what happens there.

The numbers are those of :mod:`dist_lib.async_pipeline.quadratic`. Needs plotly (``pip install dist-lib[viz]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dist_lib import viz
from dist_lib.async_pipeline.quadratic import simulate_quadratic, stability_limit, stationary_second_moment

RUNS: Sequence[tuple[str, int, float, str]] = (
    ("synchronous", 0, 0.0, viz.PAPER["baseline"]),
    ("delay 1", 1, 0.0, viz.PAPER["async"]),
    ("delay 1, error feedback", 1, 1.0, viz.SERIES[5]),
)
READ_OUTS = {"plain average (AdamW)": False, "Nesterov (Muon)": True}
KAPPA = "learning rate times curvature, kappa"


def stability_figure(betas: Sequence[float] | None = None) -> Any:
    """The largest stable ``kappa`` over the momentum, with a control for how the momentum is read out.

    Args:
        betas: momenta, ascending; default: 0 to 0.99, denser towards 1.

    Returns:
        A plotly figure with a logarithmic ``kappa`` axis.

    Raises:
        ValueError: a momentum outside 0 to 1.
    """
    grid = [*np.linspace(0.0, 0.9, 13), 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99] if betas is None else betas
    shown = [round(float(b), 4) for b in grid]
    traces = []
    for label, nesterov in READ_OUTS.items():
        for k, (name, delay, strength, color) in enumerate(RUNS):
            limits = [float(f"{stability_limit(b, nesterov, delay, strength, tolerance=1e-7):.5g}") for b in shown]
            traces.append(viz.line(shown, limits, name, index=k, color=color, meta={"read_out": label}))
    ends = {
        (nesterov, name): stability_limit(0.9, nesterov, delay, strength, tolerance=1e-6)
        for nesterov in (False, True)
        for name, delay, strength, _ in RUNS
    }
    told = [
        f"{label}: {', '.join(f'{name} {ends[nesterov, name]:.3g}' for name, *_ in RUNS)}"
        for label, nesterov in READ_OUTS.items()
    ]
    alt = (
        f"Curves of the largest stable value of {KAPPA} over the momentum, on a logarithmic axis. At momentum 0.9, "
        f"{'; '.join(told)}. With the plain average and a delay the limit is 1 at every momentum."
    )
    return viz.figure(
        title="How far a mode may be pushed before it diverges",
        x="momentum, beta",
        y=KAPPA,
        alt=alt,
        traces=traces,
        controls=[_read_out()],
        rtol=1e-4,
        yaxis_type="log",
    )


def trajectory_figure(
    *,
    kappas: Sequence[float] = (0.5, 0.9, 1.5, 2.0, 2.6, 3.3),
    betas: Sequence[float] = (0.0, 0.9, 0.95),
    steps: int = 80,
) -> Any:
    """One mode from 1, step by step, behind controls over ``kappa``, momentum and its read-out.

    Args:
        kappas, betas: what the controls offer; at least two of each.
        steps: length of a run; a run is cut where it leaves the picture.

    Returns:
        A plotly figure with three curves at a time.

    Raises:
        ValueError: fewer than two values, or one outside its range.
    """
    initial = (kappas[len(kappas) // 2], betas[len(betas) // 2])
    reach, traces, ends = 3.0, [], []
    for label, nesterov in READ_OUTS.items():
        for kappa in kappas:
            for beta in betas:
                meta = {"kappa": kappa, "beta": beta, "read_out": label}
                for k, (name, delay, strength, color) in enumerate(RUNS):
                    path = simulate_quadratic(
                        kappa, beta, nesterov=nesterov, delay=delay, error_feedback=strength, steps=steps
                    )
                    outside = np.flatnonzero(np.abs(path) > 2 * reach)
                    shown = path[: outside[0] + 1] if len(outside) else path
                    values = [float(f"{v:.4g}") if abs(v) >= 1e-4 else 0.0 for v in np.clip(shown, -1e3, 1e3)]
                    traces.append(viz.line(range(len(values)), values, name, index=k, color=color, meta=meta))
                    if (kappa, beta) == initial and not nesterov:
                        largest = float(np.abs(path[-10:]).max())
                        ends.append(f"{name} {'has diverged' if largest > reach else f'is within {largest:.2g}'}")
    alt = (
        f"Curves of one quadratic mode over {steps} updates from 1, synchronous, delayed and delayed with error "
        f"feedback; controls choose kappa, momentum and its read-out. At kappa {initial[0]:g}, momentum "
        f"{initial[1]:g} and the plain average, at the end: {', '.join(ends)}."
    )
    return viz.figure(
        title="One mode, one step of delay",
        x="update",
        y="distance from the minimum",
        alt=alt,
        traces=traces,
        controls=[
            viz.Control(key="kappa", label=f"{KAPPA}", values=list(kappas), initial=initial[0], kind="range"),
            viz.Control(key="beta", label="Momentum beta", values=list(betas), initial=initial[1], kind="range"),
            _read_out(),
        ],
        rtol=1e-3,
        yaxis_range=[-reach, reach],
        xaxis_range=[0, steps],
    )


def noise_figure(betas: Sequence[float] = (0.0, 0.5, 0.8, 0.9, 0.95)) -> Any:
    """The spread that gradient noise leaves, over ``kappa``, with a control for the momentum: when feedback hurts.

    Args:
        betas: momenta that the control offers; at least two.

    Returns:
        A plotly figure; a curve ends where its mode becomes unstable.

    Raises:
        ValueError: fewer than two momenta, or one outside 0 to 1.
    """
    kappas = [round(float(k), 3) for k in np.linspace(0.02, 0.98, 49)]
    initial = 0.9 if 0.9 in betas else betas[-1]
    traces = []
    for beta in betas:
        for k, (name, delay, strength, color) in enumerate(RUNS):
            spread = [stationary_second_moment(kappa, beta, delay=delay, error_feedback=strength) for kappa in kappas]
            kept = [(x, float(f"{y:.5g}")) for x, y in zip(kappas, spread, strict=True) if y < 20.0]
            xs, ys = [x for x, _ in kept], [y for _, y in kept]
            traces.append(viz.line(xs, ys, name, index=k, color=color, meta={"beta": beta}))
    at = [
        f"{name} {stationary_second_moment(0.5, initial, delay=delay, error_feedback=strength):.3g}"
        for name, delay, strength, _ in RUNS
    ]
    alt = (
        f"Curves of the mean square distance from the minimum under gradient noise of variance 1, over {KAPPA}; a "
        f"control chooses the momentum. At kappa 0.5 and momentum {initial:g}: {', '.join(at)}."
    )
    return viz.figure(
        title="What noise leaves, with and without error feedback",
        x=KAPPA,
        y="mean square distance",
        alt=alt,
        traces=traces,
        controls=[viz.Control(key="beta", label="Momentum beta", values=list(betas), initial=initial, kind="range")],
        rtol=1e-4,
        yaxis_type="log",
    )


def _read_out() -> viz.Control:
    labels = list(READ_OUTS)
    return viz.Control(key="read_out", label="Momentum read out by", values=labels, initial=labels[0])
