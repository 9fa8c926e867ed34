"""Pictures of the modelled training step: who is busy when, and what is sent and held.

The numbers are those of :mod:`dist_lib.step_model`; this module only draws them.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.step_model import METHODS, Scenario, StepBytes, step_bytes, timeline

KINDS = {
    "forward": "forward",
    "stale": "forward on older weights",
    "backward": "backward",
    "communication": "on a link",
    "optimizer": "optimizer",
    "idle": "idle",
}


def _spans(method: str, scenario: Scenario) -> list[tuple[str, float, float, str]]:
    found = [(s.lane, s.start, s.end, s.kind) for s in timeline(method, scenario).segments]
    return sorted(found, key=lambda span: list(KINDS).index(span[3]))


def step_figure(scenario: Scenario) -> Any:
    """One step on the lanes of a pipeline and its links, with a control that chooses the method."""
    lanes = [f"stage {k + 1}" for k in range(scenario.stages)] + ["network", "to sampler"]
    steps = {method: timeline(method, scenario) for method in METHODS}
    longest = max(step.sampler_s for step in steps.values())
    traces: list[Any] = []
    for method, label in METHODS.items():
        meta = {"method": label}
        boxes = viz.timeline(_spans(method, scenario), labels=KINDS, meta=meta)
        for box in boxes:
            box.update(width=0.72, marker_line={"width": 1, "color": "rgba(20,20,20,0.3)"}, legendgroup=box.name)
            if box.name == "idle":
                box.update(marker={"color": viz.WORK["idle"], "opacity": 0.28, "line": {"width": 0}})
        traces += boxes
        end = steps[method].step_s
        mark = go.Scatter(
            x=[end, end],
            y=[lanes[0], lanes[-1]],
            mode="lines",
            line={"color": viz.WORK["idle"], "width": 2, "dash": "dot"},
            name=f"next step may start: {end:.2f} s",
            meta=meta,
            hoverinfo="name",
        )
        traces.append(mark)
    control = viz.Control(key="method", label="Method", values=list(METHODS.values()), initial=METHODS["baseline"])
    idle = ", ".join(f"{METHODS[m]} {steps[m].share('idle'):.0%}" for m in ("baseline", "async"))
    alt = (
        f"Lanes of time for {scenario.stages} pipeline stages, the network and the link to a sampler, modelled. The "
        f"synchronous baseline ends its step after {steps['baseline'].step_s:.2f} s; Muon on every rank adds a long "
        f"optimizer, which DMuon makes short; AGoQ shortens the gradients' transfer; the one-step delay fills the "
        f"pipeline (idle: {idle}); PULSE shortens the transfer of weights to the sampler."
    )
    return viz.figure(
        title="One training step, modelled",
        x="time in the step (s)",
        y="lane",
        alt=alt,
        traces=traces,
        controls=[control],
        barmode="overlay",
        height=440,
        xaxis_range=[0, 1.02 * longest],
        yaxis={"categoryorder": "array", "categoryarray": lanes[::-1], "title": {"text": "lane"}},
    )


def bytes_figure(scenario: Scenario) -> Any:
    """What one step sends and holds, a bar for each method, with a control that chooses the quantity."""
    names = {
        "gradients": "gradients sent by a device",
        "published": "updated weights sent by a device",
        "sampler": "weights sent to the sampler",
        "activations": "activations held by the first stage",
        "second_weights": "second version of the weights, held by a device",
    }
    counted: dict[str, StepBytes] = {method: step_bytes(method, scenario) for method in METHODS}
    traces = []
    for method, label in METHODS.items():
        for name, shown in names.items():
            value = getattr(counted[method], name) / 1e9
            traces.append(
                go.Bar(
                    x=[value],
                    y=[label],
                    orientation="h",
                    name=label,
                    showlegend=False,
                    marker={"color": viz.PAPER.get(method, viz.PAPER["baseline"])},
                    text=[f"{value:.3g} GB"],
                    textposition="outside",
                    cliponaxis=False,
                    meta={"quantity": shown},
                    hovertemplate="%{y}: %{x:.4g} GB<extra></extra>",
                )
            )
    top = max(max(vars(b).values()) for b in counted.values()) / 1e9
    control = viz.Control(key="quantity", label="Bytes", values=list(names.values()), initial=names["gradients"])
    base, quantised = counted["baseline"], counted["agoq"]
    alt = (
        f"Bars of bytes in one modelled step. Gradients sent by a device: {base.gradients / 1e9:.1f} GB, with AGoQ "
        f"{quantised.gradients / 1e9:.1f} GB. Activations held: {base.activations / 1e9:.1f} GB, with AGoQ "
        f"{quantised.activations / 1e9:.1f} GB. Weights to the sampler: {base.sampler / 1e9:.1f} GB, with PULSE "
        f"{counted['pulse'].sampler / 1e9:.2f} GB."
    )
    return viz.figure(
        title="What a step sends and holds, modelled",
        x="bytes in one step (GB)",
        y="method",
        alt=alt,
        traces=traces,
        controls=[control],
        barmode="overlay",
        height=380,
        xaxis_range=[0, 1.15 * top],
        yaxis={"autorange": "reversed", "title": {"text": "method"}},
    )
