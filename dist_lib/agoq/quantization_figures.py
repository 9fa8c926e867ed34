"""Pictures of number formats and of what rounding does: levels on a line, histograms, gradients, one all-reduce.

Needs plotly (the ``viz`` extra). Levels and bytes come from the library's tables and formulas; errors of gradients and
histograms of activations are measured by the caller and drawn here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from dist_lib import viz
from dist_lib.agoq.quality import GradientQuality
from dist_lib.agoq.wire import GradientFormat, wire_bytes
from dist_lib.ops import CODECS, CodecError

FORMATS = ("fp4", "e2m1", "nf4", "int4", "int5", "int6", "int8", "dynamic8", "e4m3", "e5m2")
SYMBOLS = ("circle", "square", "diamond")
SHARD_STEPS = (
    "1 own gradient",
    "2 encoded",
    "3 after the all-to-all",
    "4 added in float32",
    "5 encoded again",
    "6 after the all-gather",
)


def _density(block: int = 128, bins: int = 80) -> tuple[list[float], list[float]]:
    """Where the numbers of normal blocks lie, as shares of the block's largest: middles of bins, and density."""
    x = torch.randn(2048, block, generator=torch.Generator().manual_seed(0))
    counts = torch.histc(x / x.abs().amax(-1, keepdim=True), bins, -1, 1)
    middles = [-1 + (k + 0.5) * 2 / bins for k in range(bins)]
    return middles, (counts / counts.max()).tolist()


def formats_figure(codecs: Sequence[str] = FORMATS) -> Any:
    """The levels of each format between -1 and 1, and the rounding error of a number in between.

    A control chooses the format. The grey hill is where the numbers of a normal block of 128 lie.
    """
    middles, hill = _density()
    traces = []
    for name in codecs:
        codec, state = CODECS[name], {"codec": name}
        levels = list(codec.levels)
        points = [levels[0]]
        for low, high in itertools.pairwise(levels):
            points += [(low + high) / 2, high]
        error = [min(abs(p - v) for v in levels) for p in points]
        traces += [
            go.Scatter(
                x=middles,
                y=[h * codec.half_gap for h in hill],
                name="where numbers lie (no scale)",
                mode="lines",
                line={"width": 0, "color": viz.WORK["idle"]},
                fill="tozeroy",
                hoverinfo="skip",
                meta=state,
            ),
            viz.line(points, error, "rounding error", color=viz.PAPER["agoq"], meta=state),
            viz.line([-1, 1], [codec.half_gap] * 2, "largest error", index=2, color=viz.WORK["stale"], meta=state),
            go.Scatter(
                x=levels,
                y=[0.0] * len(levels),
                name="levels",
                mode="markers",
                marker={"symbol": "line-ns", "size": 18, "line": {"width": 2, "color": viz.WORK["forward"]}},
                hovertemplate="level %{x:.4g}<extra></extra>",
                meta=state,
            ),
        ]
    return viz.figure(
        title="The numbers that a format can store",
        x="number, as a share of its block's largest",
        y="distance to the nearest level",
        alt=(
            "Levels on a line, and a rounding error that rises to the middle between two levels. It is largest, as a "
            "share of the block's largest number, for "
            + ", ".join(f"{c} {CODECS[c].half_gap:.2g}" for c in sorted(codecs, key=lambda c: -CODECS[c].half_gap))
        ),
        traces=traces,
        controls=[viz.Control(key="codec", label="Format", values=list(codecs), initial=codecs[0])],
        rtol=1e-3,
        xaxis_range=[-1.05, 1.05],
    )


def errors_figure(rows: Sequence[CodecError]) -> Any:
    """Measured relative error of each format, a mark for each block size; a control chooses the distribution."""
    kinds, blocks = list(dict.fromkeys(r.distribution for r in rows)), sorted({r.block_size for r in rows})
    traces = []
    for kind in kinds:
        for index, block in enumerate(blocks):
            mine = [r for r in rows if r.distribution == kind and r.block_size == block]
            traces.append(
                go.Scatter(
                    x=[r.relative_l2 for r in mine],
                    y=[r.codec for r in mine],
                    mode="markers",
                    name=f"blocks of {block}",
                    customdata=[r.bits for r in mine],
                    marker={"size": 10, "color": viz.SERIES[index], "symbol": SYMBOLS[index % len(SYMBOLS)]},
                    hovertemplate="%{y}: %{customdata:.3g} bits, error %{x:.3g}<extra>" + f"blocks of {block}</extra>",
                    meta={"kind": kind},
                )
            )
    best = min((r for r in rows if r.distribution == kinds[0] and r.bits < 5), key=lambda r: r.relative_l2)
    return viz.figure(
        title="How far each format moves numbers",
        x="relative error (L2)",
        y="format",
        alt=(
            f"Marks for each format and block size. With four bits the error is about a tenth, and {best.codec} errs "
            f"least on {kinds[0]} numbers; each further bit halves it; int8 is below a hundredth there. Smaller "
            "blocks err less and store more scales."
        ),
        traces=traces,
        controls=[viz.Control(key="kind", label="Numbers", values=kinds, initial=kinds[0])] if len(kinds) > 1 else [],
        rtol=0.02,
        xaxis={"type": "log", "dtick": "D1", "title": {"text": "relative error (L2)"}},
        yaxis={"autorange": "reversed", "title": {"text": "format"}},
        legend={"y": -0.3},
        height=500,
    )


def block_shares(x: Tensor, block: int = 64, bins: int = 41) -> list[float]:
    """Histogram of a tensor's numbers as shares of their block's largest magnitude: share of numbers in each bin.

    Args:
        x: (..., width); a short last block counts as a block.
        block: numbers that share a scale.
        bins: over -1 to 1; an odd number has a bin around zero.
    """
    counts = torch.zeros(bins, dtype=torch.float64)
    for part in x.detach().float().split(block, dim=-1):
        scaled = part / part.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        counts += torch.histc(scaled, bins, -1, 1).double()
    return [round(v, 5) for v in (counts / counts.sum()).tolist()]


def histogram_figure(
    found: Mapping[str, Mapping[int, Sequence[float]]], *, title: str, rtol: float | None = None, kind: str = "Tensor"
) -> Any:
    """Histograms of activations by tensor and layer: ``{tensor: {layer: shares of bins over -1 to 1}}``.

    Controls choose the tensor and the layer. A dotted line shows what normal numbers would give.

    Args:
        found: every tensor has the same layers.
        title: of the figure.
        rtol: with which the book's tests compare.
        kind: label of the first control.
    """
    names, layers = list(found), list(next(iter(found.values())))
    bins = len(found[names[0]][layers[0]])
    x = [-1 + (k + 0.5) * 2 / bins for k in range(bins)]
    normal = block_shares(torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)), 64, bins)
    middle = bins // 2
    traces, facts = [], []
    for name in names:
        for layer in layers:
            y = list(found[name][layer])
            traces.append(viz.bar(x, y, "found", color=viz.PAPER["agoq"], meta={"tensor": name, "layer": layer}))
        peaks = [found[name][layer][middle] for layer in layers]
        facts.append(f"{name} {min(peaks):.2f} to {max(peaks):.2f}")
    traces.append(viz.line(x, normal, "normal numbers", index=2, color=viz.WORK["idle"]))
    return viz.figure(
        title=title,
        x="number, as a share of its block's largest",
        y="share of numbers",
        alt=(
            "Histogram of a tensor's numbers within their blocks, by layer. Share of numbers in the middle bin, next "
            f"to zero: {'; '.join(facts)}; normal numbers {normal[middle]:.2f}."
        ),
        traces=traces,
        controls=[
            viz.Control(key="tensor", label=kind, values=names, initial=names[0]),
            viz.Control(key="layer", label="Layer", values=layers, initial=layers[0], kind="range"),
        ],
        rtol=rtol,
        bargap=0.05,
    )


def quality_figure(table: Mapping[tuple[str, str], GradientQuality], *, rtol: float = 0.5) -> Any:
    """Error of the whole gradient by what is stored encoded, bars by format: ``{(scheme, codec): quality}``."""
    schemes, codecs = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    first = codecs[0]
    return viz.figure(
        title="What each choice does to the whole gradient",
        x="relative error of the gradient (L2)",
        y="what is stored encoded",
        alt=f"Bars by what is stored encoded. With {first}: "
        + ", ".join(f"{s} {table[s, first].relative_l2:.2f}" for s in schemes),
        traces=[
            go.Bar(
                orientation="h",
                y=schemes,
                x=[round(table[s, c].relative_l2, 4) for s in schemes],
                name=c,
                marker={"color": viz.SERIES[i]},
            )
            for i, c in enumerate(codecs)
        ],
        rtol=rtol,
        barmode="group",
        yaxis={"autorange": "reversed", "title": {"text": "what is stored encoded"}},
        height=120 + 60 * len(schemes),
    )


def _cells(step: int, world: int) -> list[tuple[int, int, str, str]]:
    """(column, rank, kind, text) of what ranks hold after a step."""
    pairs = list(itertools.product(range(world), range(world)))
    if step in (0, 1):
        kind = ("gradients in float32", "gradients in codes")[step]
        return [(j, r, kind, f"shard {j}<br>of rank {r}") for j, r in pairs]
    if step == 2:
        return [(j, r, "gradients in codes", f"shard {r}<br>of rank {j}") for j, r in pairs]
    if step in (3, 4):
        kind = ("sum in float32", "sum in codes")[step - 3]
        return [(r, r, kind, f"shard {r}<br>of the sum") for r in range(world)]
    return [(j, r, "sum in codes", f"shard {j}<br>of the sum") for j, r in pairs]


def _reduce_traces(world: int, message: int, wide: int) -> list[Any]:
    """Squares and a note for every step; bytes of a shard in codes and in float32."""
    notes = {
        0: f"each shard: {wide:,} bytes",
        1: f"each shard: {message:,} bytes; nothing sent yet",
        2: f"each rank has sent {world - 1} x {message:,} bytes",
        3: f"one shard a rank: {wide:,} bytes; nothing sent",
        4: f"one shard a rank: {message:,} bytes; nothing sent",
        5: f"each rank has sent {world - 1} x {message:,} bytes more",
    }
    colors = {
        "gradients in float32": viz.WORK["backward"],
        "gradients in codes": viz.PAPER["agoq"],
        "sum in float32": viz.WORK["forward"],
        "sum in codes": viz.WORK["communication"],
    }
    traces = []
    for step, label in enumerate(SHARD_STEPS):
        cells, state = _cells(step, world), {"step": label}
        for kind in dict.fromkeys(c[2] for c in cells):
            traces.append(
                go.Scatter(
                    x=[c[0] for c in cells],
                    y=[f"rank {c[1]}" for c in cells],
                    text=[c[3] for c in cells],
                    mode="markers+text",
                    name=kind,
                    marker={"symbol": "square", "size": 58, "color": colors[kind]},
                    textfont={"color": "#ffffff", "size": 11},
                    hoverinfo="text",
                    showlegend=True,
                    meta=state,
                )
            )
        traces.append(
            go.Scatter(
                x=[(world - 1) / 2],
                y=[" "],
                text=[notes[step]],
                mode="text",
                showlegend=False,
                hoverinfo="skip",
                meta=state,
            )
        )
    return traces


def reduce_figure(numel: int = 2**20, world: int = 4, form: GradientFormat | None = None) -> Any:
    """One all-reduce through 8 bits, step by step: what every rank holds, and what it sends for it.

    Args:
        numel: numbers of the gradient, a multiple of ``world``.
        world: ranks.
        form: default ``int8`` in blocks of 256.
    """
    chosen = form or GradientFormat()
    message = chosen.message_bytes(numel // world)
    wide = 4 * numel // world
    traces = _reduce_traces(world, message, wide)
    found = wire_bytes("all_reduce", numel, world, chosen)
    exact = 2 * (world - 1) * wide
    return viz.figure(
        title="One all-reduce, step by step",
        x="what the rank holds",
        y="rank",
        alt=(
            f"Squares for the shards that each of {world} ranks holds after each step. All shards of its own gradient, "
            f"in float32, then in codes; its own shard of every rank; that shard's sum, in float32, then in codes; all "
            f"shards of the sum. A rank sends {found.sent:,} bytes in all; a ring in float32 would send {exact:,}."
        ),
        traces=traces,
        controls=[
            viz.Control(key="step", label="Step", values=list(SHARD_STEPS), initial=SHARD_STEPS[0], kind="range")
        ],
        xaxis={"showticklabels": False, "range": [-0.6, world - 0.4], "showgrid": False},
        yaxis={
            "categoryorder": "array",
            "categoryarray": [f"rank {r}" for r in reversed(range(world))] + [" "],
            "range": [-0.6, world + 0.4],
            "showgrid": False,
        },
        height=100 + 90 * world,
    )


def ranks_figure(found: Mapping[str, Mapping[str, Mapping[int, float]]], *, rtol: float = 0.1) -> Any:
    """Error of a sum over ranks, ``{codec: {way: {ranks: relative error}}}``; a control chooses the codec."""
    codecs, traces, facts = list(found), [], []
    for codec, ways in found.items():
        for index, (way, errors) in enumerate(ways.items()):
            shown = viz.line(list(errors), list(errors.values()), way, index=index, meta={"codec": codec})
            traces.append(shown.update(mode="lines+markers"))
            ends = [errors[min(errors)], errors[max(errors)]]
            if codec == codecs[0]:
                facts.append(f"{way}: {ends[0]:.3g} with {min(errors)} ranks, {ends[1]:.3g} with {max(errors)}")
    return viz.figure(
        title="Rounding twice, whatever the number of ranks",
        x="ranks",
        y="relative error of the sum (L2)",
        alt=f"Lines over the number of ranks. With {codecs[0]}, " + "; ".join(facts),
        traces=traces,
        controls=[viz.Control(key="codec", label="Format", values=codecs, initial=codecs[0])],
        rtol=rtol,
        xaxis={"type": "log", "tickvals": [2**k for k in range(1, 11)], "title": {"text": "ranks"}},
        yaxis_rangemode="tozero",
    )
