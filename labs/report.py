"""The report of a run: one HTML file that needs nothing else, with the run's table and figures."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.io

from dist_lib import results, viz
from labs.framework import Lab

CSS = """
body{font:16px/1.55 "Source Sans 3",system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1c2430;background:#fff}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;
border-bottom:1px solid #d5dae1;text-align:left;font-variant-numeric:tabular-nums}h1{font-size:1.6rem}
@media(prefers-color-scheme:dark){body{color:#e4e8ee;background:#14181f}td,th{border-color:#39414d}}
"""


def shown(value: Any) -> str:
    """A number as a reader wants it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}".replace(",", " ")
    return str(value)


def _table(rows: dict[str, Any]) -> str:
    body = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(shown(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{body}</table>"


def default_figures(record: results.RunRecord) -> list[Any]:
    """One figure for each logged number."""
    names = [n for n in (record.history[0] if record.history else {}) if n != "step"]
    steps = [row["step"] for row in record.history]
    return [
        viz.figure(
            title=name.replace("_", " "),
            x="step",
            y=name.replace("_", " "),
            alt=f"{name} of this run at each logged step, from step {steps[0]} to step {steps[-1]}.",
            traces=[viz.line(steps, [row.get(name) for row in record.history], name)],
        )
        for name in names
    ]


def write_report(lab: Lab, record: results.RunRecord, path: Path) -> Path:
    """Write the report of one run to ``path``."""
    figures: Sequence[Any] = (lab.figures or default_figures)(record)
    parts = [f"<h1>{html.escape(lab.title)}</h1>", f"<p>Scale {record.scale}, seed {record.seed}, {record.status}.</p>"]
    parts += ["<h2>Results</h2>", _table(record.metrics)]
    for index, figure in enumerate(figures):
        parts.append(f"<p>{html.escape((figure.layout.meta or {}).get('alt', ''))}</p>")
        parts.append(plotly.io.to_html(figure, full_html=False, include_plotlyjs=index == 0))
    seconds = {f"{k} (s)": v for k, v in record.timings.items()}
    parts += ["<h2>Time</h2>", _table({**seconds, "peak memory (MiB)": record.peak_memory_bytes / 2**20})]
    parts += ["<h2>Settings</h2>", _table({**record.config, "world_size": record.world_size, "device": record.device})]
    parts += ["<h2>Where</h2>", _table({**record.versions, "commit": record.commit, "started": record.started})]
    parts += [f"<pre>{html.escape(json.dumps(record.hardware, indent=1))}</pre>"]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(lab.name)}, {record.scale}</title><style>{CSS}</style>{''.join(parts)}</html>\n"
    )
    results.write_text(path, page)
    return path
