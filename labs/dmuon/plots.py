"""Figures of the lab, and how recorded events travel to them: gathered as numbers, kept as rows of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.dmuon.events import KINDS, Event, EventLog
from dist_lib.results import RunRecord
from labs.framework import RunContext

LABELS = {
    "dmuon": "one owner a matrix",
    "replicated": "every rank updates everything",
    "gather": "whole gradients gathered, every rank updates everything",
    "all-to-all": "whole matrices exchanged",
    "adamw": "AdamW for everything",
}
WORDS = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "reduce": ("gradients on their way", "communication"),
    "orthogonalise": ("Newton-Schulz, at the owner alone", "optimizer"),
    "adamw": ("AdamW, on this rank's share", "stale"),
    "publish": ("new weights on their way", "communication"),
    "materialise": ("weights fetched before use", "communication"),
    "wait": ("waiting", "idle"),
}
MOVES = ("reduce", "publish", "materialise")
WINDOW = 10  # steps over which a training loss is averaged
ALL = "all"


def event_rows(log: EventLog, context: RunContext) -> list[dict[str, Any]]:
    """Rows of the history for the events of all ranks; called on every rank, full on rank 0 only."""
    events = log.gather()
    if not context.dist.is_main or not events:
        return []
    step = max((row["step"] for row in context.history), default=1)
    origin = min(e.start for e in events)
    return [
        {
            "step": step,
            "event_rank": float(e.rank),
            "kind": float(KINDS.index(e.kind)),
            "layer": _layer_number(e.layer),
            "bytes": float(e.bytes),
            "start_s": e.start - origin,
            "end_s": e.end - origin,
        }
        for e in events
    ]


def _layer_number(layer: str) -> float:
    if layer == "rest":
        return -2.0
    return float(layer.rsplit(".", 1)[-1]) if layer[-1:].isdigit() else -1.0


def recorded_events(history: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The events in a record's history; times in seconds from the first."""
    names = {-2.0: "rest", -1.0: ""}
    return [
        Event(
            rank=int(row["event_rank"]),
            kind=KINDS[int(row["kind"])],
            layer=names.get(row["layer"], f"layers.{row['layer']:.0f}"),
            bytes=int(row["bytes"]),
            start=row["start_s"],
            end=row["end_s"],
        )
        for row in history
        if "event_rank" in row
    ]


def one_step(events: Sequence[Event]) -> list[Event]:
    """From the first forward of the last recorded step to the end; times in seconds from there.

    With weights published asynchronously the step before ends inside this one, as it should be seen.
    """
    first = [e for e in events if e.kind == "forward" and e.layer.endswith(".0")]
    if not first:
        return list(events)
    last_of_rank = {e.rank: e.start for e in sorted(first, key=lambda e: e.start)}
    begin = min(last_of_rank.values())
    kept = [e for e in events if e.end > begin]
    origin = min(e.start for e in kept)
    return [Event(e.rank, e.kind, e.layer, e.bytes, e.start - origin, e.end - origin) for e in kept]


def _place(event: Event) -> str:
    if event.kind == "orthogonalise":
        return "equal shapes of any layer, together"
    return {"rest": "vectors and embeddings", "": "no layer"}.get(event.layer, event.layer)


def timeline_figure(events: Sequence[Event], *, title: str = "Recorded: one step, every rank") -> Any:
    """What each rank computes and what it sends and receives, over time; a control follows one layer.

    Args:
        events: of all ranks, such as those of :func:`one_step`.
        title: of the figure.

    Raises:
        ValueError: no events.
    """
    if not events:
        raise ValueError("no events: switch the runtime's log on before the step")
    ranks = sorted({e.rank for e in events})
    layers = sorted({e.layer for e in events if e.layer.startswith("layers.")}, key=lambda n: int(n.split(".")[1]))
    rows = [f"rank {r} {what}" for r in ranks for what in ("computes", "moves data")]
    traces = []
    for view in (ALL, *layers):
        shown = [e for e in events if view in (ALL, e.layer) or e.kind == "orthogonalise"]
        for kind in dict.fromkeys(e.kind for e in sorted(shown, key=lambda e: KINDS.index(e.kind))):
            mine = [e for e in shown if e.kind == kind]
            name, color = WORDS[kind]
            traces.append(
                go.Bar(
                    orientation="h",
                    y=[f"rank {e.rank} {'moves data' if kind in MOVES else 'computes'}" for e in mine],
                    base=[1e3 * e.start for e in mine],
                    x=[1e3 * (e.end - e.start) for e in mine],
                    name=name,
                    marker={
                        "color": viz.WORK[color],
                        "pattern": {"shape": "/" if kind in ("publish", "materialise") else ""},
                        "line": {"width": 1, "color": "rgba(127,127,127,0.9)"},
                    },
                    customdata=[[_place(e), f"{e.bytes:,} B" if e.bytes else "no bytes"] for e in mine],
                    hovertemplate="%{customdata[0]}: %{x:.3g} ms, %{customdata[1]}<extra>" + name + "</extra>",
                    meta={"layer": view},
                )
            )
    moved = {r: sum(e.bytes for e in events if e.rank == r and e.kind in MOVES) for r in ranks}
    told = ", ".join(f"rank {r} {n / 1e6:.2f} MB" for r, n in moved.items())
    return viz.figure(
        title=title,
        x="time (ms)",
        y="rank",
        alt=f"Two rows for each of {len(ranks)} ranks: what it computes, and what it sends or receives, as boxes over "
        f"time. Newton-Schulz of a layer stands on its owners' rows only. Bytes moved: {told}.",
        traces=traces,
        controls=[viz.Control(key="layer", label="Layer", values=[ALL, *layers], initial=ALL)],
        rtol=1e9,  # times of a run are never the same again
        barmode="overlay",
        height=330 + 60 * len(ranks),
        yaxis={"categoryorder": "array", "categoryarray": rows[::-1], "title": {"text": "rank"}},
    )


def mean_curve(record: RunRecord, name: str) -> list[float]:
    """Training loss of each step, averaged over the last :data:`WINDOW` steps."""
    values = [row[name] for row in record.history if name in row]
    spans = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def methods_of(record: RunRecord) -> list[str]:
    """Methods that the run trained, in order."""
    return ["dmuon", *(n for n in LABELS if n in record.config["compared"])]


def loss_figure(record: RunRecord) -> Any:
    """Training losses of all methods."""
    traces = []
    for index, name in enumerate(methods_of(record)):
        y = mean_curve(record, name)
        traces.append(viz.line(range(1, len(y) + 1), y, LABELS[name], index=index))
    return viz.figure(
        title=f"The same batches, every way; mean of {WINDOW} steps",
        x="step",
        y="training loss (nats a byte)",
        alt="Training loss against the step. The curves of all kinds of Muon lie on each other; AdamW has its own.",
        traces=traces,
    )


def bytes_figure(record: RunRecord) -> Any:
    """Bytes that a rank handed to collectives in a step, by method."""
    names = methods_of(record)
    values = [record.metrics[f"{n.replace('-', '_')}_bytes_per_step"] / 1e6 for n in names]
    told = "; ".join(f"{LABELS[n]} {v:.2f}" for n, v in zip(names, values, strict=True))
    return viz.figure(
        title="Counted: bytes of one step",
        x="method",
        y="payload of the rank with the most (MB)",
        alt=f"One bar a method, megabytes in a step. {told}.",
        traces=[viz.bar([LABELS[n] for n in names], values, "counted", color=viz.WORK["communication"])],
    )


def figures(record: RunRecord) -> list[Any]:
    """Losses, bytes, and the recorded step if there is one."""
    made = [loss_figure(record), bytes_figure(record)]
    events = recorded_events(record.history)
    return [*made, timeline_figure(one_step(events))] if events else made
