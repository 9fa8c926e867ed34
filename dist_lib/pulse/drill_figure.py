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


def _lines(events: Sequence[tuple[int, Event]], color: str, symbol: str) -> dict[str, Any]:
    """Arrows that leave room for words in their middle, and marks in lanes."""
    points: list[tuple[float | None, int | None, str]] = []
    for row, event in events:
        begin, end = _AT[event.kind]
        if begin == end:
            points += [(begin, row, symbol), (None, None, symbol)]
            continue
        points += [(begin, row, "line-ns"), (begin + 0.2, row, "line-ns"), (None, None, symbol)]
        points += [(begin + 0.8, row, "line-ns"), (end, row, symbol), (None, None, symbol)]
    return {
        "x": [p[0] for p in points],
        "y": [p[1] for p in points],
        "mode": "lines+markers",
        "line": {"color": color, "width": 2},
        "marker": {"color": color, "symbol": [p[2] for p in points], "size": 10},
    }


def _words(events: Sequence[Event]) -> dict[str, Any]:
    """What happens, in the middle of an arrow or beside a mark."""
    ends = [_AT[e.kind] for e in events]
    beside = ["middle center" if a != b else "middle left" if a else "middle right" for a, b in ends]
    return {
        "x": [(a + b) / 2 for a, b in ends],
        "y": list(range(len(events))),
        "text": [f"  {e.text}  " for e in events],
        "textposition": beside,
        "mode": "text",
        "textfont": {"size": 12},
        "showlegend": False,
    }


def _traces(drill: Drill, where: dict[str, str]) -> list[Any]:
    common = {"meta": where, "cliponaxis": False, "hoverinfo": "skip"}
    traces = [go.Scatter(**_words(drill.events), name="events", **common)]
    for kind, label, color in _KINDS:
        mine = [(row, event) for row, event in enumerate(drill.events) if _kind(event) == kind]
        symbol = {"note": "circle", "bad": "x"}.get(kind, "triangle-right")
        if mine:
            traces.append(go.Scatter(**_lines(mine, color, symbol), name=label, **common))
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
        x="who writes and reads",
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
        height=180 + 21 * rows,
        xaxis={
            "range": [-0.12, 2.12],
            "tickvals": [0, 1, 2],
            "ticktext": list(LANES),
            "showgrid": True,
            "title": {"text": "who writes and reads"},
        },
        yaxis={
            "range": [rows - 0.4, -1.0],
            "showticklabels": False,
            "showgrid": False,
            "title": {"text": "events, from top to bottom"},
        },
        annotations=[
            {"x": i, "y": 1, "yref": "paper", "yanchor": "bottom", "text": lane, "showarrow": False}
            for i, lane in enumerate(LANES)
        ],
        legend={"y": -0.08},
    )
