"""Pictures of pipelines: who computes what, when, on which weights.

:func:`schedule_figure` draws events, whether simulated or recorded from a run; :func:`schedule_explorer` draws many
schedules behind controls; :func:`idle_figure` what the closed forms say. Needs plotly (``pip install dist-lib[viz]``),
so the package does not import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.async_pipeline import formulas
from dist_lib.async_pipeline.schedules import SCHEDULES, Event, Kind, Name, make_schedule
from dist_lib.async_pipeline.simulator import Simulation, StageTimes, simulate

LABELS: Mapping[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, for the inputs",
    "backward_weight": "backward, for the weights",
    "update": "update",
}
COLORS: Mapping[Kind, str] = {
    "forward": viz.WORK["forward"],
    "backward": viz.WORK["backward"],
    "backward_input": viz.WORK["backward"],
    "backward_weight": viz.SERIES[7],
    "update": viz.WORK["optimizer"],
}
NAMES: Mapping[Name, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B, flushed",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "pipedream": "PipeDream",
    "2bw": "PipeDream-2BW",
}
PATTERNS: Sequence[str] = ("", "/", "x", ".")
"""The hatching of a box tells the version of the weights, in turn: versions 0 and 4 are plain, 1 and 5 hatched."""

TIMES = StageTimes(forward_s=1.0, backward_s=2.0)
_EDGE = {"width": 1, "color": "rgba(20,20,20,0.35)"}
_HOVER = "%{y}: batch %{customdata[0]}, micro-batch %{customdata[1]}, weights W(%{customdata[2]})"


def _pattern(shape: str | list[str]) -> dict[str, Any]:
    return {"shape": shape, "size": 7, "solidity": 0.22, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.8)"}


def _row(stage: int) -> str:
    return f"stage {stage}"


def _boxes(
    events: Sequence[Event], *, unit: float, digits: int, numbers: bool, legend: bool = True, **more: Any
) -> list[Any]:
    """One trace for each kind of work; times divided by ``unit`` and rounded, to keep the figure small."""
    traces, m = [], 1 + max(e.action.micro_batch for e in events)
    for kind, label in LABELS.items():
        mine = [e for e in events if e.action.kind == kind and (kind != "update" or e.end_s > e.start_s)]
        if not mine:
            continue
        starts = [round(e.start_s / unit, digits) for e in mine]
        shapes = [PATTERNS[e.action.version % len(PATTERNS)] if kind != "update" else "" for e in mine]
        traces.append(
            go.Bar(
                orientation="h",
                y=[_row(e.stage) for e in mine],
                base=starts,
                x=[round(e.end_s / unit - start, digits) for e, start in zip(mine, starts, strict=True)],
                width=0.78,
                name=label,
                legendgroup=kind,
                showlegend=legend,
                customdata=[[e.action.batch, e.action.micro_batch, e.action.version] for e in mine],
                hovertemplate=_HOVER + f"<extra>{label}</extra>",
                text=[e.action.batch * m + e.action.micro_batch for e in mine]
                if numbers and kind != "update"
                else None,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                constraintext="both",
                marker={
                    "color": COLORS[kind],
                    "line": _EDGE,
                    "pattern": _pattern(shapes),
                },
                **more,
            )
        )
    return traces


def _version_legend(versions: Sequence[int], **more: Any) -> list[Any]:
    """Legend entries that say which hatching stands for which versions."""
    traces = []
    for k, shape in enumerate(PATTERNS):
        shown = [v for v in versions if v % len(PATTERNS) == k]
        if shown:
            name = "on weights " + ", ".join(f"W({v})" for v in shown[:3]) + (", ..." if len(shown) > 3 else "")
            marker = {"color": viz.WORK["idle"], "line": _EDGE, "pattern": _pattern(shape)}
            traces.append(
                go.Bar(x=[None], y=[_row(0)], orientation="h", name=name, hoverinfo="skip", marker=marker, **more)
            )
    return traces


def _axis(stages: int) -> dict[str, Any]:
    rows = [_row(s) for s in range(stages)]
    return {
        "categoryorder": "array",
        "categoryarray": rows[::-1],
        "range": [-0.5, stages - 0.5],
        "title": {"text": "stage"},
        "showgrid": False,
    }


def schedule_figure(
    source: Simulation | Sequence[Event],
    *,
    title: str = "A pipeline at work",
    alt: str | None = None,
    unit_s: float = 1.0,
    unit: str = "s",
    numbers: bool = True,
    end_s: float | None = None,
) -> Any:
    """Draw a pipeline: a row for each stage, a box for each piece of work, hatched by the version of its weights.

    Args:
        source: a simulation, or events that the runtime recorded.
        title: of the figure.
        alt: text for those who cannot see it; default: sizes, length, idle shares and versions, from the events.
        unit_s, unit: the unit of the time axis in seconds, and its name: ``(1e-3, "ms")``, or a forward's time.
        numbers: write in each box, where it fits, the micro-batch's number in the run.
        end_s: where the time axis ends, in seconds; give two figures the same to compare them. Default: the last end.

    Returns:
        A plotly figure.

    Raises:
        ValueError: no events, or a unit that is not positive.
    """
    events = list(source.events if isinstance(source, Simulation) else source)
    if not events or not unit_s > 0:
        raise ValueError(f"{len(events)} events in units of {unit_s} s: give at least one event and a positive unit")
    first = min(e.start_s for e in events)
    events = [Event(e.stage, e.action, e.start_s - first, e.end_s - first) for e in events]
    stages, last = 1 + max(e.stage for e in events), max(e.end_s for e in events)
    versions = sorted({e.action.version for e in events if e.action.kind != "update"})
    return viz.figure(
        title=title,
        x=f"time ({unit})",
        y="stage",
        alt=alt or _describe(events, stages, last / unit_s, unit),
        traces=[*_boxes(events, unit=unit_s, digits=4, numbers=numbers), *_version_legend(versions)],
        barmode="overlay",
        uniformtext={"minsize": 9, "mode": "hide"},
        height=190 + 46 * stages,
        legend_y=-64 / (70 + 46 * stages),  # below the title of the time axis, at any height
        xaxis_range=[0, 1.01 * (last if end_s is None else end_s) / unit_s],
        yaxis=_axis(stages),
    )


def _describe(events: Sequence[Event], stages: int, length: float, unit: str) -> str:
    last = max(e.end_s for e in events)
    idle = [1 - sum(e.end_s - e.start_s for e in events if e.stage == s) / last if last else 0.0 for s in range(stages)]
    behind = max(e.action.batch - e.action.version for e in events if e.action.kind != "update")
    batches = len({e.action.batch for e in events})
    low, high = f"{min(idle):.0%}", f"{max(idle):.0%}"
    waits = low if low == high else f"{low} to {high}"
    lag = "the newest weights" if behind == 0 else f"weights up to {behind} update{'s' * (behind > 1)} old"
    return (
        f"Boxes of forward and backward work in time on {stages} rows, one for each stage of a pipeline, over "
        f"{batches} batches and {length:.4g} {unit}. The stages are idle {waits} of the "
        f"time. Batches are computed on {lag}."
    )


def schedule_explorer(
    *,
    stages: Sequence[int] = (2, 4),
    micro_batches: Sequence[int] = (4, 8),
    schedules: Sequence[Name] = SCHEDULES,
    batches: int = 3,
    chunks: int = 2,
    times: StageTimes = TIMES,
    initial: tuple[int, int, Name] | None = None,
) -> Any:
    """Schedules side by side behind controls over stages, micro-batches and schedule; time in forwards.

    Args:
        stages, micro_batches, schedules: what the controls offer; at least two of each, and every combination valid.
        batches: how many batches are drawn.
        chunks: chunks on a stage in the interleaved schedule.
        times: of every stage; the time axis counts in ``times.forward_s``.
        initial: stages, micro-batches and schedule shown first; default: the last, the first, ``"1f1b"`` if offered.

    Returns:
        A plotly figure whose traces carry ``meta`` with the three controls' keys.

    Raises:
        ScheduleError: a combination that does not exist, such as ``2bw`` with ``m < p``.
        ValueError: a control with one value only, or an initial value that none offers.
    """
    first = initial or (stages[-1], micro_batches[0], "1f1b" if "1f1b" in schedules else schedules[0])
    traces: list[Any] = []
    longest, seen, shares = 0.0, set[int](), []
    for p in stages:
        for m in micro_batches:
            for name in schedules:
                v = chunks if name == "interleaved" else 1
                schedule = make_schedule(name, stages=p, micro_batches=m, batches=batches, chunks=v)
                found = simulate(schedule, times)
                meta = {"stages": p, "micro_batches": m, "schedule": NAMES[name]}
                end = found.makespan_s / times.forward_s
                longest = max(longest, end)
                seen |= {e.action.version for e in found.events if e.action.kind != "update"}
                traces += _boxes(found.events, unit=times.forward_s, digits=3, numbers=p * m <= 16, meta=meta)
                traces.append(_end_mark(end, p, f"end: {end:.4g} forwards, idle {found.idle_share(0):.0%}", meta))
                if (p, m) == first[:2]:
                    shares.append(f"{NAMES[name]} {found.idle_share(0):.0%}")
    controls = [
        viz.Control(key="stages", label="Stages p", values=list(stages), initial=first[0], kind="range"),
        viz.Control(
            key="micro_batches", label="Micro-batches m", values=list(micro_batches), initial=first[1], kind="range"
        ),
        viz.Control(key="schedule", label="Schedule", values=[NAMES[n] for n in schedules], initial=NAMES[first[2]]),
    ]
    alt = (
        f"Boxes of forward and backward work in time, simulated, a row for each stage, {batches} batches; controls "
        f"choose the stages, the micro-batches and the schedule. With {first[0]} stages and {first[1]} micro-batches a "
        f"stage is idle: {', '.join(shares)}. Only PipeDream and PipeDream-2BW begin a batch before the last one ends."
    )
    return viz.figure(
        title="Schedules of a pipeline, simulated",
        x="time (forwards of one micro-batch)",
        y="stage",
        alt=alt,
        traces=[*traces, *_version_legend(sorted(seen))],
        controls=controls,
        barmode="overlay",
        uniformtext={"minsize": 9, "mode": "hide"},
        height=190 + 46 * max(stages),
        xaxis_range=[0, 1.01 * longest],
        yaxis=_axis(max(stages)),
    )


def _end_mark(end: float, stages: int, name: str, meta: Mapping[str, Any]) -> Any:
    return go.Scatter(
        x=[round(end, 3)] * 2,
        y=[_row(0), _row(stages - 1)],
        mode="lines",
        line={"color": viz.WORK["idle"], "width": 2, "dash": "dot"},
        name=name,
        meta=meta,
        hoverinfo="name",
    )


def idle_figure(*, stages: Sequence[int] = (2, 4, 8, 16), most: int = 64, chunks: int = 2, batches: int = 100) -> Any:
    """Idle shares by the closed forms, over the micro-batches in a batch, with a control for the depth.

    Args:
        stages: depths that the control offers.
        most: the largest number of micro-batches, for each depth from the depth itself in multiples of it.
        chunks: chunks of the interleaved schedule.
        batches: length of the run over which 2BW's one fill and drain is spread.

    Returns:
        A plotly figure.

    Raises:
        ValueError: fewer than two depths, or one beyond ``most``.
    """
    if max(stages) > most:
        raise ValueError(f"stages={list(stages)} with at most {most} micro-batches: give most={max(stages)} or more")
    curves: list[tuple[Name, str, dict[str, int]]] = [
        ("1f1b", "GPipe and 1F1B", {}),
        ("interleaved", f"interleaved, {chunks} chunks", {"chunks": chunks}),
        ("zb-h1", "ZB-H1", {}),
        ("2bw", f"2BW, over {batches} batches", {"batches": batches}),
    ]
    traces = []
    for p in stages:
        sizes = list(range(p, most + 1, p))
        for k, (name, label, more) in enumerate(curves):
            shares = [round(formulas.idle_share(name, stages=p, micro_batches=m, **more), 5) for m in sizes]
            traces.append(viz.line(sizes, shares, label, index=k, meta={"stages": p}))
            traces[-1].update(mode="lines+markers" if len(sizes) < 9 else "lines")
    p = stages[-1]
    worst, best = (formulas.idle_share(n, stages=p, micro_batches=p, **m) for n, _, m in (curves[0], curves[-1]))
    alt = (
        f"Curves of the idle share falling with the number of micro-batches in a batch, from closed forms. With {p} "
        f"stages and {p} micro-batches, GPipe and 1F1B idle {worst:.0%} of the time, 2BW {best:.1%} over {batches} "
        "batches; interleaving and ZB-H1 lie between."
    )
    return viz.figure(
        title="Idle time by the formulas",
        x="micro-batches in a batch, m",
        y="idle share of a stage",
        alt=alt,
        traces=traces,
        controls=[viz.Control(key="stages", label="Stages p", values=list(stages), initial=p, kind="range")],
        yaxis_range=[0, 0.55],
        yaxis_tickformat=".0%",
    )
