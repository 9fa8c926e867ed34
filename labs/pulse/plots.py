"""Figures of the lab: rewards, changed cells step by step, bytes of a changed cell by codec, what workers send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.results import RunRecord

LOOP_NAMES = {"pulse": "PULSELoCo", "diloco": "DiLoCo, dense", "ddp": "data parallel"}
CODEC_NAMES = {"paper": "paper's format", "fast": "fast", "small": "small"}


def _rows(record: RunRecord, key: str) -> tuple[list[int], list[float]]:
    rows = [row for row in record.history if key in row]
    return [int(row["step"]) for row in rows], [row[key] for row in rows]


def changes_figure(record: RunRecord) -> Any:
    """Share of cells whose bits changed, by step of GRPO."""
    steps, changed = _rows(record, "changed_percent")
    return viz.figure(
        title="Few weights change in a step",
        x="step",
        y="changed cells (%)",
        alt=f"Share of bfloat16 weights whose bits changed in each of {len(steps)} steps, at most {max(changed):.1f} %",
        traces=[viz.line(steps, changed, "changed", color=viz.PAPER["pulse"])],
        rtol=0.2,
    )


def codecs_figure(record: RunRecord) -> Any:
    """Bytes of a changed cell with each codec, on the same changes."""
    names = [c for c in CODEC_NAMES if f"bytes_per_change_{c}" in record.metrics]
    sizes = [float(record.metrics[f"bytes_per_change_{c}"]) for c in names]
    bar = go.Bar(x=[CODEC_NAMES[c] for c in names], y=sizes, marker={"color": viz.PAPER["pulse"]}, name="bytes")
    return viz.figure(
        title="The same changes, three codecs",
        x="codec",
        y="bytes a changed cell",
        alt="Bars: " + ", ".join(f"{CODEC_NAMES[c]} {s:.2f} bytes" for c, s in zip(names, sizes, strict=True)),
        traces=[bar],
        rtol=0.2,
    )


def rewards_figure(record: RunRecord) -> Any:
    """Mean reward of each worker 0's batches under the three outer loops, over steps of their own."""
    traces, names = [], []
    for index, (key, name) in enumerate(LOOP_NAMES.items()):
        steps, rewards = _rows(record, f"{key}_reward")
        if steps:
            traces.append(viz.line([s - steps[0] + 1 for s in steps], rewards, name, index=index))
            names.append(name)
    return viz.figure(
        title="Training apart on the same problems",
        x="step of worker 0",
        y="mean reward of its batch",
        alt=f"Lines of rewards over steps for {', '.join(names)}; they stay within the noise of their batches",
        traces=traces,
        rtol=0.2,
    )


def traffic_figure(record: RunRecord) -> Any:
    """Bytes that rank 0 handed to collectives, by outer loop."""
    names = [n for n in LOOP_NAMES if f"{n}_bytes_of_a_rank" in record.metrics]
    sizes = [float(record.metrics[f"{n}_bytes_of_a_rank"]) / 1e6 for n in names]
    bar = go.Bar(
        x=[LOOP_NAMES[n] for n in names], y=sizes, marker={"color": viz.WORK["communication"]}, name="bytes of a rank"
    )
    return viz.figure(
        title="What one worker hands to collectives",
        x="method",
        y="MB in the whole run (logarithmic)",
        yaxis_type="log",
        alt="Bars: " + ", ".join(f"{LOOP_NAMES[n]} {s:.3g} MB" for n, s in zip(names, sizes, strict=True)),
        traces=[bar],
        rtol=0.2,
    )


def figures(record: RunRecord) -> Sequence[Any]:
    """All figures that the record has data for."""
    found = []
    if any("changed_percent" in row for row in record.history):
        found += [changes_figure(record), codecs_figure(record)]
    if any(f"{n}_reward" in row for row in record.history for n in LOOP_NAMES):
        found += [rewards_figure(record), traffic_figure(record)]
    return found
