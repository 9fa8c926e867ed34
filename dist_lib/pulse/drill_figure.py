"""The protocol as a sequence that a reader can break: who writes and reads what, and which version is served.

Each combination of fault and object is one run of :func:`dist_lib.pulse.drill.run_drill`, made when the figure is
made. Needs plotly (``pip install dist-lib[viz]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.pulse.drill import FAULTS, PARTS, Drill, Event, run_drill

LANES = ("publisher", "store", "receiver")
_BAD = viz.SERIES[7]
_KINDS: Sequence[tuple[str, str, str]] = (
    ("write", "written", viz.WORK["optimizer"]),
    ("read", "read", viz.WORK["communication"]),
    ("note", "state", viz.WORK["idle"]),
    ("bad", "damaged, missing or dead", _BAD),
)
_AT = {"write": (0, 1), "read": (1, 2), "publisher": (0, 0), "store": (1, 1), "receiver": (2, 2)}


def _kind(event: Event) -> str:
    return "bad" if not event.good else event.kind if event.kind in ("write", "read") else "note"


def _marks(events: Sequence[tuple[int, Event]], symbol: str) -> dict[str, list[Any]]:
    """Points of one trace: an arrow with its text in the middle, or a mark in a lane with the text beside it."""
    points: list[tuple[float | None, int | None, str, str, str]] = []
    for row, event in events:
        begin, end = _AT[event.kind]
        if begin == end:
            points.append((begin, row, event.text, "middle left" if begin else "middle right", symbol))
        else:
            for x, text, mark in (
                (begin, "", "line-ns"),
                (begin + 0.2, "", "line-ns"),
                (None, "", "line-ns"),
                (begin + 0.5, event.text, "line-ns"),
                (None, "", "line-ns"),
                (begin + 0.8, "", "line-ns"),
                (end, "", symbol),
            ):
                points.append((x, None if x is None else row, text, "middle center", mark))
        points.append((None, None, "", "middle center", symbol))
    names = ("x", "y", "text", "textposition", "symbol")
    return {name: [p[i] for p in points] for i, name in enumerate(names)}


def _traces(drill: Drill, where: dict[str, str]) -> list[Any]:
    traces = []
    for kind, label, color in _KINDS:
        mine = [(row, event) for row, event in enumerate(drill.events) if _kind(event) == kind]
        symbol = {"note": "circle", "bad": "x"}.get(kind, "triangle-right")
        marks = _marks(mine, symbol)
        symbols = marks.pop("symbol")
        if mine:
            traces.append(
                go.Scatter(
                    **marks,
                    name=label,
                    mode="lines+markers+text",
                    textfont={"size": 12},
                    line={"color": color, "width": 2},
                    marker={"color": color, "symbol": symbols, "size": 10},
                    meta=where,
                    cliponaxis=False,
                    hoverinfo="skip",
                )
            )
    return traces


def drill_figure() -> Any:
    """Publisher, store and receiver as lanes, events downwards; controls choose fault and object."""
    traces, rows, facts = [], 0, []
    for fault, words in FAULTS.items():
        for part in PARTS:
            drill = run_drill(fault, part)
            rows = max(rows, len(drill.events))
            traces += _traces(drill, {"fault": words, "part": part})
            if not drill.identical:
                facts.append(f"{fault} at the {part}: a third state was served")
    shown = "in every combination all that was served had been published, bit for bit"
    return viz.figure(
        title="Break it, and watch it recover",
        x="who",
        y="events, from top to bottom",
        alt=(
            "A sequence of arrows between three lanes: the publisher writes payload, manifest, marker and hint into "
            "the store, the receiver reads them in the opposite order and then serves the version. "
            f"{len(FAULTS)} choices "
            f"of fault at {len(PARTS)} objects: {'; '.join(facts) or shown}"
        ),
        traces=traces,
        controls=[
            viz.Control(key="fault", label="Fault", values=list(FAULTS.values()), initial=FAULTS["none"]),
            viz.Control(key="part", label="at the patch's", values=list(PARTS), initial=PARTS[0]),
        ],
        height=130 + 21 * rows,
        xaxis={
            "range": [-0.12, 2.12],
            "tickvals": [0, 1, 2],
            "ticktext": list(LANES),
            "side": "top",
            "showgrid": True,
            "title": {"text": "who"},
        },
        yaxis={
            "range": [rows - 0.4, -1.0],
            "showticklabels": False,
            "showgrid": False,
            "title": {"text": "events, from top to bottom"},
        },
        legend={"y": -0.02},
    )
