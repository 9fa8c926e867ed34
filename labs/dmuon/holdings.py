"""A picture of who holds what at each moment of a step, drawn from an owner plan by the runtimes' rules."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.dmuon.layout import layer_of
from dist_lib.dmuon.plan import OwnerPlan

WAYS = ("everyone does everything", "owners, weights everywhere", "owners, weights fetched")
THINGS = {
    "weight": ("weight in use", "square", (-0.2, 0.18), viz.WORK["forward"]),
    "momentum": ("momentum", "diamond", (0.2, 0.18), viz.WORK["idle"]),
    "gradient": ("gradient", "circle", (-0.2, -0.18), viz.WORK["stale"]),
    "work": ("Newton-Schulz runs here", "star", (0.2, -0.18), viz.WORK["optimizer"]),
}
Cell = tuple[int, str]


def moments(plan: OwnerPlan) -> tuple[str, ...]:
    """Moments of a step that are drawn, for the second of the plan's layers."""
    layer = _layers(plan)[1]
    return ("between steps", f"forward of {layer}", f"backward of {layer}", "update")


def _layers(plan: OwnerPlan) -> list[str]:
    found = list(dict.fromkeys(layer_of(m.name) for m in plan.matrices))
    if len(found) < 2:
        raise ValueError(f"layers {found}: the picture needs at least two")
    return found


def holdings(plan: OwnerPlan, way: str, moment: str) -> dict[str, set[Cell]]:
    """Which rank holds what of which matrix.

    Args:
        plan: owners.
        way: one of :data:`WAYS`.
        moment: one of :func:`moments`.

    Returns:
        For each key of :data:`THINGS`, pairs of rank and name.

    Raises:
        ValueError: an unknown way or moment, or fewer than two layers.
    """
    if way not in WAYS or moment not in moments(plan):
        raise ValueError(f"{way!r}, {moment!r}: ways are {WAYS}, moments {moments(plan)}")
    layers, names = _layers(plan), [m.name for m in plan.matrices]
    everywhere = {(r, n) for r in range(plan.world_size) for n in names}
    owned = {(plan.owner(n), n) for n in names}
    order = {n: layers.index(layer_of(n)) for n in names}
    everyone = way == WAYS[0]
    found: dict[str, set[Cell]] = {
        "weight": owned if way == WAYS[2] else everywhere,
        "momentum": everywhere if everyone else owned,
        "gradient": set(),
        "work": set(),
    }
    step = moments(plan).index(moment)
    if way == WAYS[2] and step in (1, 2):
        at_work = (1, 2) if step == 1 else (0, 1)  # the layer itself, and the one that is fetched ahead
        found["weight"] = owned | {(r, n) for r, n in everywhere if order[n] in at_work}
    if step == 2:
        own_part = {(r, n) for r, n in everywhere if order[n] == 1}
        done = {(r, n) for r, n in (everywhere if everyone else owned) if order[n] > 1}
        found["gradient"] = own_part | done
    if step == 3:
        found["gradient"] = found["work"] = everywhere if everyone else owned
    return found


def short_name(name: str) -> str:
    """A matrix's name without what all have in common: ``0.gate`` for ``layers.0.mlp.gate_proj.weight``."""
    for part in ("layers.", "self_attn.", "mlp.", "_proj", ".weight"):
        name = name.replace(part, "")
    return name


def _short(name: str) -> str:
    """``2 down`` of ``layers.2.mlp.down_proj.weight``."""
    number = layer_of(name).rsplit(".", 1)[-1]
    return f"{number} {name.removesuffix('.weight').rsplit('.', 1)[-1].removesuffix('_proj')}"


def holdings_figure(plan: OwnerPlan, *, title: str = "Who holds what") -> Any:
    """Ranks as rows, matrices as columns, one mark for each thing held; controls choose the way and the moment."""
    names = [_short(m.name) for m in plan.matrices]
    place = {m.name: i for i, m in enumerate(plan.matrices)}
    traces, told = [], []
    for way in WAYS:
        for moment in moments(plan):
            found = holdings(plan, way, moment)
            if moment == "update":
                told.append(f"{way}: Newton-Schulz runs {len(found['work'])} times")
            for key, (label, symbol, (dx, dy), color) in THINGS.items():
                cells = sorted(found[key], key=lambda c: (c[0], place[c[1]]))
                traces.append(
                    go.Scatter(
                        x=[place[n] + dx for _, n in cells],
                        y=[r - dy for r, _ in cells],
                        mode="markers",
                        name=label,
                        marker={"symbol": symbol, "size": 9, "color": color},
                        customdata=[f"rank {r}: {label} of {names[place[n]]}" for r, n in cells],
                        meta={"way": way, "moment": moment},
                        hovertemplate="%{customdata}<extra></extra>",
                    )
                )
    return viz.figure(
        title=title,
        x="layer and matrix",
        y="rank",
        alt=f"A grid of {plan.world_size} ranks and {len(names)} matrices, one mark for each thing that a rank holds. "
        + "; ".join(told),
        traces=traces,
        controls=[
            viz.Control(key="way", label="Way", values=list(WAYS), initial=WAYS[0]),
            viz.Control(key="moment", label="Moment", values=list(moments(plan)), initial="update"),
        ],
        height=260 + 56 * plan.world_size,
        xaxis={
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "tickangle": -90,
            "range": [-0.6, len(names) - 0.4],
            "title": {"text": "layer and matrix", "standoff": 8},
        },
        yaxis={
            "tickvals": list(range(plan.world_size)),
            "range": [plan.world_size - 0.4, -0.6],
            "title": {"text": "rank"},
            "zeroline": False,
        },
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        margin={"b": 130},
    )
