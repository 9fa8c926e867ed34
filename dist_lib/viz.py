"""Figures that look alike: one palette, one theme, helpers for what the book draws often.

Every figure has a title, axes with units, and alternative text; :func:`figure` refuses to make one without. Controls
are declared, not drawn: ``layout.meta`` lists them, each trace says for which values it is shown, and the book's own
script draws accessible HTML for them. In a plain notebook the initial state is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go

# Okabe and Ito's set where it serves, darkened or lightened until each colour has a contrast of at least 3:1 on both
# the light and the dark page; the values are checked in the tests.
PAPER: Mapping[str, str] = {
    "baseline": "#7A828E",
    "muon": "#2F7FD1",
    "dmuon": "#2F7FD1",
    "agoq": "#C45A9E",
    "async": "#D0641F",
    "pulse": "#1B9070",
}
WORK: Mapping[str, str] = {
    "forward": "#3D8FD1",
    "backward": "#7A6FD0",
    "optimizer": "#D0641F",
    "communication": "#1B9070",
    "idle": "#8A8F98",
    "stale": "#B8860B",
}
SERIES: Sequence[str] = ("#2F7FD1", "#D0641F", "#1B9070", "#C45A9E", "#B8860B", "#7A6FD0", "#7A828E", "#C4504A")
DASHES: Sequence[str] = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
FONT = "Source Sans 3, Source Sans Pro, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
HEIGHT = 420


@dataclass(frozen=True, kw_only=True)
class Control:
    """One control of a figure.

    Attributes:
        key: the name under which traces refer to it.
        label: what the reader sees, with a unit if there is one.
        values: the choices, in order.
        initial: the one shown first.
        kind: ``"range"`` for an ordered quantity (a slider), ``"select"`` for names.
    """

    key: str
    label: str
    values: Sequence[str | int | float]
    initial: str | int | float
    kind: Literal["range", "select"] = "select"

    def __post_init__(self) -> None:
        if len(self.values) < 2 or self.initial not in self.values:
            raise ValueError(
                f"control {self.key!r}: needs at least two values and an initial one among them; got "
                f"{list(self.values)} and {self.initial!r}"
            )

    def as_meta(self) -> dict[str, Any]:
        """The form in which the control travels inside the figure."""
        return {
            "key": self.key,
            "label": self.label,
            "kind": self.kind,
            "values": list(self.values),
            "initial": self.initial,
        }


def template() -> go.layout.Template:
    """The figure theme. Colours that depend on light and dark are left to the page."""
    axis = {
        "showline": False,
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "gridcolor": "rgba(127,127,127,0.22)",
        "title": {"standoff": 10},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 14, "color": "#6b7280"},
            "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 17}, "pad": {"b": 12}},
            "colorway": list(SERIES),
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"},
            "margin": {"l": 56, "r": 16, "t": 56, "b": 56},
            "hoverlabel": {"font": {"family": FONT}},
            "height": HEIGHT,
        }
    )


def _visible(trace: Any, state: Mapping[str, Any]) -> bool:
    meta = trace.meta if isinstance(trace.meta, dict) else {}
    return all(meta.get(key, value) == value for key, value in state.items())


def figure(
    *,
    title: str,
    x: str,
    y: str,
    alt: str,
    traces: Sequence[Any] = (),
    controls: Sequence[Control] = (),
    rtol: float | None = None,
    **layout: Any,
) -> go.Figure:
    """Make a figure in the book's theme.

    Args:
        title: what is seen, in a few words.
        x, y: axis titles, with units in brackets where there are any.
        alt: what a reader who cannot see the figure needs to know; at least 30 characters.
        traces: plotly traces; one with ``meta={"steps": 5}`` is shown while the control ``steps`` stands at 5.
        controls: see :class:`Control`.
        rtol: relative tolerance with which the tests compare the figure's numbers; None means exactly.
        **layout: further layout entries, such as ``xaxis_type="log"``.

    Raises:
        ValueError: a missing title, axis title or description; a trace that names a value no control has.
    """
    for name, value, least in (("title", title, 3), ("x", x, 1), ("y", y, 1), ("alt", alt, 30)):
        if len(value.strip()) < least:
            raise ValueError(f"{name}={value!r}: a figure needs a {name} of at least {least} characters")
    by_key = {c.key: c for c in controls}
    fig = go.Figure(data=list(traces))
    for trace in fig.data:
        for key, value in (trace.meta or {}).items() if isinstance(trace.meta, dict) else ():
            if key in by_key and value not in by_key[key].values:
                raise ValueError(
                    f"a trace is for {key}={value!r}, which the control does not offer: {list(by_key[key].values)}"
                )
        trace.visible = _visible(trace, {c.key: c.initial for c in controls})
    meta: dict[str, Any] = {"alt": alt, "controls": [c.as_meta() for c in controls]}
    if rtol is not None:
        meta["rtol"] = rtol
    fig.update_layout(template=template(), title_text=title, xaxis_title_text=x, yaxis_title_text=y, meta=meta)
    fig.update_layout(**layout)
    return fig


def line(
    x: Sequence[Any], y: Sequence[Any], name: str, *, index: int = 0, color: str | None = None, **more: Any
) -> Any:
    """One curve; ``index`` picks colour and dash together, so that curves differ without colour too."""
    style = {"color": color or SERIES[index % len(SERIES)], "dash": DASHES[index % len(DASHES)], "width": 2.5}
    return go.Scatter(x=list(x), y=list(y), name=name, mode="lines", line=style, **more)


def bar(x: Sequence[Any], y: Sequence[Any], name: str, *, color: str, **more: Any) -> Any:
    """One set of bars."""
    return go.Bar(x=list(x), y=list(y), name=name, marker={"color": color}, **more)


def timeline(
    spans: Sequence[tuple[str, float, float, str]], *, labels: Mapping[str, str] = {}, **more: Any
) -> list[Any]:
    """Boxes on rows, one trace for each kind of work.

    Args:
        spans: ``(row, begin, end, kind)``; ``kind`` is a key of :data:`WORK`.
        labels: legend names of kinds, default the kind itself.
        **more: further trace entries, such as ``meta``.

    Raises:
        ValueError: an unknown kind or a span that ends before it begins.
    """
    for row, begin, end, kind in spans:
        if kind not in WORK or end < begin:
            raise ValueError(f"span {(row, begin, end, kind)}: kinds are {sorted(WORK)}, and an end follows its begin")
    traces, names = [], labels or {}
    for kind in dict.fromkeys(s[3] for s in spans):
        mine = [s for s in spans if s[3] == kind]
        traces.append(
            go.Bar(
                orientation="h",
                y=[s[0] for s in mine],
                base=[s[1] for s in mine],
                x=[s[2] - s[1] for s in mine],
                name=names.get(kind, kind),
                marker={"color": WORK[kind], "line": {"width": 0}},
                customdata=[s[2] for s in mine],
                hovertemplate="%{y}: %{base:.3g} to %{customdata:.3g}<extra>" + names.get(kind, kind) + "</extra>",
                **more,
            )
        )
    return traces
