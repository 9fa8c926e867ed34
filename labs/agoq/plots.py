"""Figures of the lab: where the bytes are, how far each gradient is from the exact one, and the losses."""

from __future__ import annotations

from typing import Any

from dist_lib import viz
from dist_lib.results import RunRecord

LABELS = {
    "baseline": "nothing",
    "activations": "activations",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "all": "all three",
}
SCHEMES = {
    "layers": "all that<br>AGoQ stores",
    "attention": "queries,<br>keys, values",
    "layers and attention": "both<br>of these",
    "every saved tensor": "every<br>saved tensor",
}
KINDS = (
    ("weights", "weights", "idle"),
    ("bytes_held_for_backward", "activations held for backward", "forward"),
    ("gradient_bytes", "gradients", "backward"),
    ("optimizer_state_bytes", "optimizer state", "optimizer"),
)
WINDOW = 10  # steps over which a training loss is averaged


def methods_of(record: RunRecord) -> list[str]:
    """Methods that the run trained, in order."""
    return ["baseline", *record.config["compared"]]


def memory_figure(record: RunRecord) -> Any:
    """Counted bytes of each kind, by what is encoded."""
    names = methods_of(record)
    found = {**record.metrics}
    width = 2 if record.config["dtype"] == "bfloat16" else 4
    found |= {f"{n}_weights": width * found["parameters"] for n in names}
    traces, told = [], []
    for key, label, color in KINDS:
        values = [found.get(f"{n}_{key}") for n in names]
        if any(values):
            told.append(f"{label} {', '.join(f'{(v or 0) / 1e6:.3g}' for v in values)}")
            y = [None if v is None else v / 1e6 for v in values]
            traces.append(viz.bar([LABELS[n] for n in names], y, label, color=viz.WORK[color]))
    return viz.figure(
        title="Counted: bytes in memory on one rank",
        x="what is kept in few bits",
        y="MB",
        alt=f"Stacked bars, megabytes, one bar for each of {', '.join(LABELS[n] for n in names)}. {'; '.join(told)}.",
        traces=traces,
        barmode="stack",
    )


def error_figure(record: RunRecord) -> Any:
    """Relative error of the whole gradient, at the start and at the trained weights."""
    suffix = "_gradient_error"
    names = [k.removesuffix(suffix) for k in record.metrics if k.endswith(suffix)]
    plain = [n.replace("_", " ") for n in names]
    labels = [LABELS.get(n, SCHEMES.get(n, n)) for n in plain]
    traces, told = [], []
    for key, label, color in ((f"{suffix}_at_start", "at the start", "stale"), (suffix, "trained", "backward")):
        values = [record.metrics[f"{n}{key}"] for n in names]
        told.append(f"{label}: " + ", ".join(f"{n} {v:.3g}" for n, v in zip(plain, values, strict=True)))
        traces.append(viz.bar(labels, values, label, color=viz.WORK[color]))
    return viz.figure(
        title="What decides: error of the whole gradient",
        x="what is kept in few bits",
        y="|g − exact| / |exact|",
        alt=f"Bars, relative distance from the exact gradient. {'; '.join(told)}.",
        traces=traces,
        barmode="group",
        xaxis={"tickangle": 0, "title": {"text": "what is kept in few bits", "standoff": 8}},
    )


def wire_figure(record: RunRecord) -> Any:
    """Bytes that leave a rank in one step for its gradients."""
    names = methods_of(record)
    values = [record.metrics[f"{n}_bytes_sent_a_step"] / 1e6 for n in names]
    told = ", ".join(f"{LABELS[n]} {v:.3f}" for n, v in zip(names, values, strict=True))
    return viz.figure(
        title="Gradients that leave a rank in one step",
        x="what is kept in few bits",
        y="MB",
        alt=f"Bars, megabytes sent: {told}.",
        traces=[viz.bar([LABELS[n] for n in names], values, "sent", color=viz.WORK["communication"])],
    )


def mean_curve(record: RunRecord, name: str) -> list[float]:
    """Training loss of each step, averaged over the last :data:`WINDOW` steps."""
    values = [row[name] for row in record.history if row.get(name) is not None]
    spans = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def loss_figure(record: RunRecord) -> Any:
    """Training losses of all methods."""
    curves = {n: mean_curve(record, n) for n in methods_of(record)}
    traces = [viz.line(range(1, len(y) + 1), y, LABELS[n], index=i) for i, (n, y) in enumerate(curves.items())]
    return viz.figure(
        title=f"What decides nothing: losses of a short run; mean of {WINDOW} steps",
        x="step",
        y="training loss (nats a byte)",
        alt="Training loss against the step for every method. The curves lie within each other's noise, which says "
        "little: short runs forgive even formats that are too coarse.",
        traces=traces,
    )


def figures(record: RunRecord) -> list[Any]:
    """Memory, gradient errors and bytes sent where there are any, and losses."""
    made = [memory_figure(record)]
    if any(key.endswith("_gradient_error") for key in record.metrics):
        made.append(error_figure(record))
    if "baseline_bytes_sent_a_step" in record.metrics:
        made.append(wire_figure(record))
    return [*made, loss_figure(record)]
