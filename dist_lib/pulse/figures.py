"""Pictures of sparse weight sync: a weight in its rounding cell, sparsity over steps, models, utilisation.

Needs plotly (``pip install dist-lib[viz]``), so the package does not import it. Curves called *simulated* are synthetic
AdamW streams (:mod:`dist_lib.pulse.streams`), computed when the figure is made; those called *published* come from
:mod:`dist_lib.pulse.published`. Nothing is typed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from dist_lib import viz
from dist_lib.pulse.published import CELLS_7B, CODED, PUBLISHED, PUBLISHED_KS
from dist_lib.pulse.sparsity_measures import crossing_model, threshold_model, ulp
from dist_lib.pulse.streams import StreamStep, adamw_stream
from dist_lib.pulse.timing import (
    PAPER_COMPUTE_S,
    PAPER_FULL_BYTES,
    PAPER_PATCH_BYTES,
    SyncCost,
    bandwidth_needed,
    sync_seconds,
    utilisation,
)

WARM_UP = 30
"""Steps of a stream before it is measured: Adam's second moment has settled by then."""

REGIMES: Mapping[str, str] = {"bf16": "stored in BF16", "fp32": "FP32 master"}
_COLOR: Mapping[str, str] = {"bf16": viz.PAPER["pulse"], "fp32": viz.SERIES[1]}


def cell_paths(weight: float, step: float, count: int) -> dict[str, list[float]]:
    """One weight under equal steps, in spacings above its start.

    Args:
        weight: where it starts; rounded to bfloat16 first.
        step: of the optimizer, in spacings of bfloat16 at the start, at least 0.
        count: of steps.

    Returns:
        ``count + 1`` values each for ``"master"`` (float32), ``"cast"`` (what a forward pass sees of it) and
        ``"stored"`` (a weight that is rounded after every step and has no master).
    """
    start = torch.tensor([weight]).bfloat16().float()
    spacing = ulp(start)
    master, stored = start.clone(), start.clone()
    paths: dict[str, list[float]] = {"master": [], "cast": [], "stored": []}
    for _ in range(count + 1):
        for name, value in (("master", master), ("cast", master.bfloat16().float()), ("stored", stored)):
            paths[name].append(round(float((value - start) / spacing), 4))
        master, stored = master + step * spacing, (stored + step * spacing).bfloat16().float()
    return paths


def cell_figure(weight: float = 0.019, steps: Sequence[float] = (0.15, 0.45, 0.6), count: int = 8) -> Any:
    """One weight step by step: its FP32 master, the cast of the master, and the same weight without a master.

    Controls choose the size of a step and how many were taken. Dashed lines are the borders of rounding cells.
    """
    styles: Mapping[str, tuple[str, str, str]] = {
        "master": ("FP32 master", viz.WORK["idle"], "lines+markers"),
        "cast": ("what the forward pass sees of it", viz.SERIES[1], "lines"),
        "stored": ("the same weight stored in BF16", viz.PAPER["pulse"], "lines"),
    }
    traces, facts, most = [], [], 0.0
    for step in steps:
        paths = cell_paths(weight, step, count)
        most = max(most, *paths["cast"], *paths["stored"])
        facts.append(f"after {count} steps of {step}: {paths['cast'][-1]:g} and {paths['stored'][-1]:g}")
        for n in range(count + 1):
            for name, (label, color, mode) in styles.items():
                flat = name != "master"
                traces.append(
                    go.Scatter(
                        x=list(range(n + 1)),
                        y=paths[name][: n + 1],
                        name=label,
                        mode="lines+markers" if n == 0 else mode,
                        line={
                            "color": color,
                            "width": 3 if flat else 1.5,
                            "shape": "hv" if flat else "linear",
                            "dash": "dash" if name == "stored" else "solid",
                        },
                        marker={"size": 7},
                        meta={"step": step, "count": n},
                        hovertemplate="after step %{x}: %{y:.2f} spacings<extra>" + label + "</extra>",
                    )
                )
    border = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "line": {"dash": "dot", "width": 1, "color": "#8A8F98"},
    }
    top = round(most + 1)
    return viz.figure(
        title="One weight in its rounding cells",
        x="steps taken",
        y="distance from the start (BF16 spacings)",
        alt=(
            "A master weight climbs in a straight line; its cast follows in whole spacings, each time a dotted cell "
            "border is crossed; the weight stored in BF16 stays where it is while a step is below half a spacing and "
            f"moves by a whole one above. Distance of cast and stored weight {'; '.join(facts)}"
        ),
        traces=traces,
        controls=[
            viz.Control(key="step", label="Step (spacings)", values=list(steps), initial=steps[1]),
            viz.Control(
                key="count", label="Steps taken", values=list(range(count + 1)), initial=count // 2, kind="range"
            ),
        ],
        height=480,
        shapes=[{**border, "y0": k + 0.5, "y1": k + 0.5} for k in range(top)],
        xaxis={"range": [-0.3, count + 0.3], "dtick": 1, "title": {"text": "steps taken"}},
        yaxis={
            "range": [-0.4, top + 0.1],
            "dtick": 1,
            "title": {"text": "distance from the start (BF16 spacings)"},
        },
    )


def _up(value: float) -> float:
    """The next tenth above: what a description says must hold on every processor."""
    return math.ceil(10 * value) / 10


def simulated_curve(
    storage: str, lr: float, ks: Sequence[int] = PUBLISHED_KS, *, cells: int = 200_000, seed: int = 0
) -> list[float]:
    """S_k in percent of a synthetic AdamW stream, over windows that all begin after ``WARM_UP`` steps.

    Args:
        storage: ``"bf16"`` or ``"fp32"``, see :func:`~dist_lib.pulse.streams.adamw_stream`.
        lr: learning rate.
        ks: lengths of the windows, at least 1.
        cells: number of weights.
        seed: of weights and gradients.
    """
    found, base = {}, None
    for step in adamw_stream(cells, lr=lr, steps=WARM_UP + max(ks), storage=storage, seed=seed):
        if step.step == WARM_UP + 1:
            base = step.old.view(torch.int16)
        if base is not None and step.step - WARM_UP in ks:
            same = (step.new.view(torch.int16) == base).double().mean()
            found[step.step - WARM_UP] = 100 * float(same)
    return [found[k] for k in ks]


def sparsity_figure(*, cells: int = 200_000, recorded: Mapping[str, tuple[Sequence[int], Sequence[float]]] = {}) -> Any:
    """Sparsity over k: published, and simulated at the same learning rate with and without a master.

    Args:
        cells: of the simulated streams.
        recorded: more curves, drawn for every setting: name to ``(ks, S_k in percent)``.
    """
    ks = [str(k) for k in PUBLISHED_KS]
    curves = {
        (storage, lr): simulated_curve(storage, lr, cells=cells)
        for storage in REGIMES
        for lr in sorted({c.lr for c in PUBLISHED})
    }
    traces, worst = [], dict.fromkeys(REGIMES, 0.0)
    for curve in PUBLISHED:
        where = {"setting": curve.label}
        for i, (storage, name) in enumerate(REGIMES.items()):
            values = curves[storage, curve.lr]
            if curve is PUBLISHED[0]:
                worst[storage] = max(abs(a - b) for a, b in zip(values, curve.values, strict=True))
            shown = [round(v, 3) for v in values]
            line = viz.line(ks, shown, f"simulated, {name}", index=i, color=_COLOR[storage], meta=where)
            traces.append(line)
        traces.append(
            go.Scatter(
                x=ks,
                y=list(curve.values),
                name="published",
                mode="markers",
                marker={"size": 11, "symbol": "diamond", "color": viz.WORK["idle"]},
                meta=where,
            )
        )
    for i, (name, (distances, found)) in enumerate(recorded.items()):
        traces.append(viz.line([str(k) for k in distances], [round(v, 3) for v in found], name, index=i + 3))
    first = PUBLISHED[0]
    return viz.figure(
        title="Unchanged weights after k steps",
        x="steps between the two states (k)",
        y="cells with the same bits (%)",
        alt=(
            f"Published points of {first.label} fall from {first.values[0]} to {first.values[-1]} per cent. A stream "
            f"stored in BF16 stays within {_up(worst['bf16'])} points of them; one with FP32 masters falls much faster "
            f"and is up to {worst['fp32']:.0f} points away"
        ),
        traces=traces,
        controls=[
            viz.Control(
                key="setting", label="Published setting", values=[c.label for c in PUBLISHED], initial=first.label
            )
        ],
        rtol=1e-3,
        xaxis_type="category",
    )


def _settled(storage: str, lr: float, cells: int) -> StreamStep:
    last = None
    for step in adamw_stream(cells, lr=lr, steps=WARM_UP + 1, storage=storage):
        last = step
    assert last is not None
    return last


def models_figure(
    lrs: Sequence[float] = (5e-7, 1e-6, 2e-6, 3e-6, 5e-6, 1e-5, 2e-5, 5e-5), *, cells: int = 200_000
) -> Any:
    """Density over learning rate: counted on streams, and what the two models say from the updates alone."""
    traces, off = [], 0.0
    for i, (storage, name) in enumerate(REGIMES.items()):
        model = threshold_model if storage == "bf16" else crossing_model
        counted, predicted = [], []
        for lr in lrs:
            step = _settled(storage, lr, cells)
            counted.append(100 * float((step.old.view(torch.int16) != step.new.view(torch.int16)).double().mean()))
            predicted.append(100 * (1 - model(step.update, step.weight)))
        off = max(off, *(abs(a - b) for a, b in zip(counted, predicted, strict=True)))
        label = "threshold model" if storage == "bf16" else "crossing model"
        traces.append(
            viz.line(lrs, [round(p, 4) for p in predicted], f"{label} ({name})", index=i, color=_COLOR[storage])
        )
        traces.append(
            go.Scatter(
                x=list(lrs),
                y=[round(c, 4) for c in counted],
                name=f"counted, {name}",
                mode="markers",
                marker={"size": 10, "symbol": "circle-open" if i else "circle", "color": _COLOR[storage]},
            )
        )
    return viz.figure(
        title="Density and learning rate",
        x="learning rate",
        y="changed cells in a step (%)",
        alt=(
            "Two rising lines on logarithmic axes, one for weights stored in BF16 and above it one for FP32 masters, "
            f"with counted points on both; models and counts are at most {_up(off)} points apart. The upper line bends "
            "because weights near zero change in every step already"
        ),
        traces=traces,
        rtol=0.02,
        xaxis={"type": "log", "title": {"text": "learning rate"}, "exponentformat": "e", "dtick": 1},
        yaxis={"type": "log", "title": {"text": "changed cells in a step (%)"}, "dtick": 1},
    )


def transfers() -> dict[str, float]:
    """Bytes of one sync of a 7B model: what the paper counts, and what two bytes for each parameter come to."""
    return {
        "all weights, 14 GB": PAPER_FULL_BYTES,
        "all weights, 15.2 GB": 2 * CELLS_7B,
        "patch, 190 MB": 190e6,
        "patch, 140 MB": PAPER_PATCH_BYTES,
        "patch, 108 MB": 108e6,
    }


def utilisation_figure(computes: Sequence[float] = (10.0, PAPER_COMPUTE_S, 360.0)) -> Any:
    """Share of time that a trainer computes, over the link's bandwidth; controls: time between syncs, what counts.

    Args:
        computes: seconds of computing between two syncs, the middle one shown first.
    """
    coded = CODED[0]
    counted = {
        "transfer only": SyncCost(),
        "transfer and coding": SyncCost(encode_s=coded.encode_s, decode_s=coded.decode_s),
    }
    grid = [10 ** (1 + i / 8) for i in range(33)]
    traces, middle = [], computes[len(computes) // 2]
    for compute in computes:
        for what, cost in counted.items():
            where = {"compute": compute, "counted": what}
            for i, (name, nbytes) in enumerate(transfers().items()):
                used = cost if name.startswith("patch") else SyncCost()
                share = [100 * utilisation(compute, sync_seconds(nbytes, 1e6 * b, cost=used)) for b in grid]
                traces.append(
                    viz.line([round(b, 2) for b in grid], [round(s, 2) for s in share], name, index=i, meta=where)
                )
    need = [bandwidth_needed(n, middle, 0.9) / 1e9 for n in (PAPER_FULL_BYTES, PAPER_PATCH_BYTES)]
    return viz.figure(
        title="How busy a link leaves the trainer",
        x="bandwidth (Mbit/s)",
        y="time spent computing (%)",
        alt=(
            "S-shaped curves that rise with bandwidth; those of patches lie two decades to the left of those of all "
            f"weights. With {middle} s between syncs, 90 % need {need[0]:.3g} Gbit/s for all weights and "
            f"{need[1]:.2g} Gbit/s for a patch of 140 MB"
        ),
        traces=traces,
        controls=[
            viz.Control(key="compute", label="Computing between syncs (s)", values=list(computes), initial=middle),
            viz.Control(key="counted", label="Counted", values=list(counted), initial="transfer only"),
        ],
        shapes=[
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 90, "y1": 90,
                "line": {"dash": "dot", "width": 1.5, "color": "#8A8F98"},
            }
        ],
        xaxis={"type": "log", "title": {"text": "bandwidth (Mbit/s)"}, "dtick": 1},
        yaxis={"range": [0, 101], "title": {"text": "time spent computing (%)"}},
    )  # fmt: skip
