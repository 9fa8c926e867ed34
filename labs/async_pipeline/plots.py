"""Figures of the lab, and how recorded events travel to them: gathered as numbers, kept as rows of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dist_lib import viz
from dist_lib.async_pipeline import Action, Event, PipelineMesh
from dist_lib.async_pipeline.schedules import KINDS
from dist_lib.comm import collectives
from dist_lib.results import RunRecord

LABELS = {"adamw": "AdamW", "muon": "Muon, AdamW for the rest"}
WORDS = {"sync": "synchronous", "delay": "one step late", "feedback": "late, with error feedback"}
WINDOW = 10  # steps over which a training loss is averaged
SHOWN = 12  # micro-batches of the recorded schedule that are drawn


def event_rows(events: Sequence[Event], mesh: PipelineMesh) -> list[dict[str, Any]]:
    """Rows of the history for the events of all stages of replica 0; called on every rank, full on rank 0 only."""
    numbers = [
        [KINDS.index(e.action.kind), e.action.batch, e.action.micro_batch, e.action.version, e.start_s, e.end_s]
        for e in events
    ]
    mine = torch.tensor(numbers, dtype=torch.float64, device=mesh.device).reshape(-1, 6)
    everyone = collectives.all_gather(mine)  # every stage does as many actions
    rows = []
    for stage in range(mesh.stages):
        for kind, batch, micro_batch, version, start, end in everyone[stage * mesh.replicas].tolist():
            row = {"step": batch + 1, "event_stage": float(stage), "kind": kind, "micro_batch": micro_batch}
            rows.append({**row, "version": version, "start_s": start, "end_s": end})
    return rows if mesh.stage == mesh.replica == 0 else []


def recorded_events(history: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The events in a record's history."""
    return [
        Event(
            stage=int(row["event_stage"]),
            action=Action(
                kind=KINDS[int(row["kind"])],
                stage=int(row["event_stage"]),
                batch=int(row["step"]) - 1,
                micro_batch=int(row["micro_batch"]),
                version=int(row["version"]),
            ),
            start_s=row["start_s"],
            end_s=row["end_s"],
        )
        for row in history
        if "event_stage" in row
    ]


def mean_curve(record: RunRecord, name: str) -> list[float]:
    """Training loss of each step, averaged over seeds and over the last :data:`WINDOW` steps."""
    by_seed: dict[float, list[float]] = {}
    for row in record.history:
        if name in row:
            by_seed.setdefault(row["seed"], []).append(row[name])
    means = [sum(values) / len(values) for values in zip(*by_seed.values(), strict=False)]
    spans = [means[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(means))]
    return [sum(span) / len(span) for span in spans]


def loss_figure(record: RunRecord) -> Any:
    """Training losses, one optimizer at a time."""
    traces = []
    for optimizer, label in LABELS.items():
        for index, (variant, word) in enumerate(WORDS.items()):
            y = mean_curve(record, f"{optimizer} {variant}")
            traces.append(viz.line(range(1, len(y) + 1), y, word, index=index, meta={"optimizer": label}))
    return viz.figure(
        title=f"The same batches, three ways; mean of {WINDOW} steps",
        x="step",
        y="training loss (nats a byte)",
        alt="Training loss against the step for synchronous training, for gradients that are one step old, and for old "
        "gradients with error feedback.",
        traces=traces,
        controls=[viz.Control(key="optimizer", label="Optimizer", values=list(LABELS.values()), initial="AdamW")],
    )


def gap_figure(record: RunRecord) -> Any:
    """What the delay adds to the validation loss, and what is left of it."""
    found = record.metrics
    traces = []
    for key, word, color in (("gap", WORDS["delay"], "stale"), ("gap_left", WORDS["feedback"], "optimizer")):
        values = [found.get(f"{optimizer}_{key}") for optimizer in LABELS]
        half = [found.get(f"{optimizer}_{key}_spread", 0.0) / 2 for optimizer in LABELS]
        bars = {"type": "data", "array": half, "color": viz.WORK["idle"]}
        traces.append(viz.bar(list(LABELS.values()), values, word, color=viz.WORK[color], error_y=bars))
    text = "; ".join(f"{label} {found[f'{o}_gap']:.3f}" for o, label in LABELS.items() if f"{o}_gap" in found)
    return viz.figure(
        title="Loss added by the delay",
        x="optimizer",
        y="validation loss above synchronous (nats a byte)",
        alt=f"Bars: what one step of delay adds to the validation loss, and what error feedback leaves. {text}.",
        traces=traces,
        barmode="group",
    )


def schedule(record: RunRecord) -> Any:
    """The recorded order of work of the last training, its first micro-batches."""
    from dist_lib.async_pipeline.figures import schedule_figure

    events = recorded_events(record.history)
    m = int(record.config["micro_batches"])
    first = min(e.action.batch for e in events)
    early = [e for e in events if (e.action.batch - first) * m + e.action.micro_batch < SHOWN]
    return schedule_figure(early, title="Recorded: who did what, when")


def figures(record: RunRecord) -> list[Any]:
    """Losses, gaps, and the recorded schedule if there is one."""
    made = [loss_figure(record), gap_figure(record)]
    if any("event_stage" in row for row in record.history):
        made.append(schedule(record))
    return made
