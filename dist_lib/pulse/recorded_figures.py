"""Pictures of recorded runs: sparsity under reinforcement learning, and which weights change.

The records are JSON files that the lab writes (``labs.pulse.rl`` and ``labs.pulse.stream``); this module draws what it
is given and knows no folder. Needs plotly (``pip install dist-lib[viz]``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import plotly.graph_objects as go
from torch import Tensor

from dist_lib import viz
from dist_lib.pulse.state import as_words

STORAGE: Mapping[str, str] = {"bf16": "stored in BF16", "fp32": "FP32 master"}
OPTIMIZER: Mapping[str, str] = {"adamw": "AdamW", "muon": "Muon"}
LOWEST = -18
"""Exponents below are drawn together."""

Exponents = Sequence[tuple[int, int, int]]


def exponents_of(old: Tensor, new: Tensor) -> list[tuple[int, int, int]]:
    """Exponent e (2^e <= |w| < 2^(e+1)), cells and changed cells, for each exponent of a bfloat16 tensor.

    Args:
        old, new: bfloat16, of one shape; zeros and subnormals count as -127.
    """
    x, y = as_words(old), as_words(new)
    exponent = ((x >> 7) & 255).astype(np.int64)
    cells = np.bincount(exponent, minlength=256)
    changed = np.bincount(exponent[x != y], minlength=256)
    return [(e - 127, int(cells[e]), int(changed[e])) for e in range(256) if cells[e]]


def _joined(exponents: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for e, cells, changed in exponents:
        a, b = found.get(max(e, LOWEST), (0, 0))
        found[max(e, LOWEST)] = a + cells, b + changed
    return found


def exponents_figure(streams: Mapping[str, Exponents]) -> Any:
    """Which weights there are and which of them change, by exponent; a control chooses the stream.

    Args:
        streams: name to exponents, cells and changed cells of one step; at least two.
    """
    traces, facts = [], []
    for name, exponents in streams.items():
        found = dict(sorted(_joined(exponents).items()))
        total, changed = (sum(v[i] for v in found.values()) for i in (0, 1))
        x, where = list(found), {"stream": name}
        shares = [100 * b / a for a, b in found.values()]
        traces.append(
            viz.bar(
                x,
                [round(100 * a / total, 4) for a, _ in found.values()],
                "of all cells",
                color=viz.WORK["idle"],
                meta=where,
            )
        )
        traces.append(
            viz.bar(
                x,
                [round(100 * b / changed, 4) for _, b in found.values()],
                "of the changed cells",
                color=viz.PAPER["pulse"],
                meta=where,
            )
        )
        traces.append(
            go.Scatter(
                x=x,
                y=[round(s, 4) for s in shares],
                name="changed in this class",
                mode="lines+markers",
                line={"color": viz.SERIES[1], "width": 2},
                meta=where,
            )
        )
        small = [e for e, share in zip(x, shares, strict=True) if share > 50]
        facts.append(
            f"{name}: most cells change up to exponent {max(small)}" if small else f"{name}: none mostly change"
        )
    names = list(streams)
    return viz.figure(
        title="Which weights change",
        x="exponent of the old weight (-18 and below together)",
        y="share (%)",
        alt=(
            "Bars of how cells and changed cells are spread over exponents, and a line of the share that changed in "
            f"each, which falls from nearly all of the small weights to nearly none of the large. {'; '.join(facts)}"
        ),
        traces=traces,
        controls=[viz.Control(key="stream", label="Stream", values=names, initial=names[0])],
        rtol=0.03,
        barmode="group",
    )


def mean_curves(runs: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, float], dict[int, list[float]]]:
    """S_k in percent of recorded runs by optimizer, storage and learning rate, one value for each seed."""
    found: dict[tuple[str, str, float], dict[int, list[float]]] = {}
    for run in runs:
        curve = found.setdefault((run["optimizer"], run["storage"], float(run["lr"])), {})
        for k, value in run["sparsity"].items():
            curve.setdefault(int(k), []).append(float(value))
    return found


def rl_figure(runs: Iterable[Mapping[str, Any]]) -> Any:
    """S_k of recorded runs of reinforcement learning; a control chooses the learning rate.

    Args:
        runs: of the record, each with ``optimizer``, ``storage``, ``lr`` and ``sparsity`` (k to percent).

    Raises:
        ValueError: no runs.
    """
    curves = mean_curves(runs)
    if not curves:
        raise ValueError("the record holds no runs: make one with python -m labs.pulse.rl --study")
    rates = sorted({lr for _, _, lr in curves})
    traces, facts = [], []
    for lr in rates:
        for i, storage in enumerate(STORAGE):
            for optimizer in OPTIMIZER:
                curve = curves.get((optimizer, storage, lr))
                if curve is None:
                    continue
                means = {k: fmean(values) for k, values in sorted(curve.items())}
                name = f"{OPTIMIZER[optimizer]}, {STORAGE[storage]}"
                traces.append(
                    viz.line(
                        [str(k) for k in means],
                        [round(v, 2) for v in means.values()],
                        name,
                        index=i + 2 * (optimizer == "muon"),
                        meta={"lr": f"{lr:.0e}".replace("e-0", "e-")},
                    )
                )
                if lr == rates[0]:
                    facts.append(f"{name}: {means[1]:.1f} for one step, {means[max(means)]:.0f} for {max(means)}")
    labels = [f"{lr:.0e}".replace("e-0", "e-") for lr in rates]
    controls = (
        [viz.Control(key="lr", label="Learning rate", values=labels, initial=labels[0])] if len(labels) > 1 else []
    )
    return viz.figure(
        title="Unchanged weights under reinforcement learning (recorded)",
        x="steps between the two states (k)",
        y="cells with the same bits (%)",
        alt=f"Falling lines over k. In per cent, at {rates[0]:.0e}: {'; '.join(facts)}",
        traces=traces,
        controls=controls,
        xaxis_type="category",
    )


def link_figure(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Seconds of a sync over narrow links, measured and by the closed form, for patches and full copies.

    Args:
        rows: of the record, each with ``mode``, ``megabits_per_s`` (None for no link), ``subscribers``, ``median_s``
            and ``closed_form_s``; rows without a link are left out.

    Raises:
        ValueError: no row has a link.
    """
    linked = [row for row in rows if row["megabits_per_s"] is not None]
    if not linked:
        raise ValueError("the record holds no shaped link: make one with python -m labs.pulse.link --record")
    names = {"patch": ("patch", viz.PAPER["pulse"]), "full": ("full copy", viz.WORK["idle"])}
    ordered = sorted(linked, key=lambda r: (r["subscribers"], r["megabits_per_s"], r["mode"]))
    label = [f"{names[r['mode']][0]},<br>{r['megabits_per_s']:g}<br>Mbit/s<br>to {r['subscribers']}" for r in ordered]
    traces = []
    for mode, (name, color) in names.items():
        mine = [(x, round(r["median_s"], 4)) for x, r in zip(label, ordered, strict=True) if r["mode"] == mode]
        traces.append(viz.bar([x for x, _ in mine], [y for _, y in mine], f"{name}, measured", color=color))
    model = [round(r["closed_form_s"], 4) for r in ordered]
    marks = {"color": viz.SERIES[1], "size": 26, "symbol": "line-ew-open", "line": {"width": 4}}
    traces.append(go.Scatter(x=label, y=model, name="closed form", mode="markers", marker=marks))
    off = max(ordered, key=lambda r: r["median_s"])
    return viz.figure(
        title="A sync over a narrow link (recorded)",
        x="what, rate of each host's link, number of subscribers",
        y="seconds of a sync",
        alt=(
            f"Bars of {len(ordered)} settings, each with a mark of the closed form. The longest sync is a "
            f"{names[off['mode']][0]} over {off['megabits_per_s']:g} Mbit/s to {off['subscribers']}: measured "
            f"{off['median_s']:.1f} s, by the closed form {off['closed_form_s']:.1f} s"
        ),
        traces=traces,
        xaxis={"categoryorder": "array", "categoryarray": label, "title": {"standoff": 16}},
        legend={"y": -0.42},
        height=480,
        barmode="overlay",
    )
