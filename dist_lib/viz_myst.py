"""Draws plotly figures of notebooks in the built book (a myst-nb mime renderer).

A notebook stores plotly's own mime type. This renderer writes the figure as HTML: a ``figure`` element with the data
beside it, which ``book/_static/figures.js`` draws with the one local plotly.js. It needs docutils, which the book has.
"""

from __future__ import annotations

import html
import json
from typing import Any

MIME = "application/vnd.plotly.v1+json"


def figure_html(data: dict[str, Any]) -> str:
    """HTML of one figure: empty plot, description, data.

    Raises:
        ValueError: a figure without a description in ``layout.meta.alt``.
    """
    layout = data.get("layout", {})
    meta = layout.get("meta") or {}
    alt = meta.get("alt")
    if not alt:
        raise ValueError("a figure has no description (layout.meta.alt); make it with dist_lib.viz.figure")
    body = json.dumps({"data": data.get("data", []), "layout": layout}, separators=(",", ":")).replace("<", "\\u003c")
    height = int(layout.get("height") or layout.get("template", {}).get("layout", {}).get("height") or 420)
    return (
        f'<figure class="book-figure" data-traces="{len(data.get("data", []))}">'
        f'<div class="book-controls"></div>'
        f'<div class="book-plot" role="img" aria-label="{html.escape(alt, quote=True)}" '
        f'style="min-height:{height}px"></div>'
        f'<script type="application/json" class="book-data">{body}</script>'
        f'<figcaption class="book-caption"><span>{html.escape(alt)}</span></figcaption>'
        f"</figure>"
    )


class PlotlyRenderer:
    """Entry point ``myst_nb.mime_renderers``."""

    mime_priority_overrides = (("html", MIME, 1),)

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> Any:
        """Return docutils nodes for a plotly figure in a block, None for anything else."""
        if inline or data.mime_type != MIME:
            return None
        from docutils import nodes

        content = data.content if isinstance(data.content, dict) else json.loads(data.content)
        return [nodes.raw(text=figure_html(content), format="html")]
