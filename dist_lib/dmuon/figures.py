"""Pictures of owner plans: balance over ranks, who owns what, bytes by mode, modelled against published times.

Needs plotly (the ``viz`` extra). The numbers are those of the plan, the byte formulas and the cost model; this module
only draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.comm import NetworkModel
from dist_lib.dmuon.bytes import MODES, Mode, wire_parts
from dist_lib.dmuon.cost_model import Hardware, Row, balance_table, overlap, reproduction_table, saturation_ranks
from dist_lib.dmuon.costs import Cost
from dist_lib.dmuon.layout import natural_key
from dist_lib.dmuon.plan import MatrixSpec, Method, OwnerPlan, make_plan
from dist_lib.dmuon.workloads import workload

METHOD_NAMES: Mapping[Method, str] = {
    "milp": "integer program",
    "lpt": "dearest first",
    "round_robin": "in turn",
    "rank0": "all on rank 0",
}


def balance_figure(
    models: Sequence[str] = ("qwen2.5-7b", "llama3-8b", "wallx", "pi0"),
    worlds: Sequence[int] = (8, 16, 32, 64, 128, 256, 512),
    *,
    methods: Sequence[Method] = ("milp", "lpt", "round_robin"),
    cost: Cost | None = None,
) -> Any:
    """Time of the fullest owner over the number of ranks, with the mean load and the floor of one matrix.

    Controls choose model and method. Times are modelled: A800 rates by default.
    """
    model_cost, traces, facts = cost or Hardware().owned_cost(), [], []
    ranks = [str(w) for w in worlds]
    for model in models:
        specs = workload(model)
        for method in methods:
            rows = balance_table(specs, worlds, method=method, cost=model_cost)
            traces.append(
                viz.line(
                    ranks,
                    [1e3 * r.largest for r in rows],
                    "fullest owner",
                    color=viz.PAPER["dmuon"],
                    meta={"model": model, "method": METHOD_NAMES[method]},
                    customdata=[r.balance for r in rows],
                    hovertemplate="%{x} ranks: %{y:.3g} ms, %{customdata:.2f} of the mean<extra></extra>",
                )
            )
        traces.append(viz.line(ranks, [1e3 * r.mean for r in rows], "mean", index=2, meta={"model": model}))
        floor = [1e3 * r.matrix_floor for r in rows]
        traces.append(viz.line(ranks, floor, "largest matrix alone", index=1, meta={"model": model}))
        facts.append(f"{model} beyond about {saturation_ranks(specs, model_cost):.0f} ranks")
    return viz.figure(
        title="When more ranks stop helping",
        x="data-parallel ranks",
        y="Newton-Schulz of a step (ms, modelled)",
        alt=(
            "Falling lines of the fullest owner's time over the number of ranks. They follow the mean, which halves "
            "with every doubling, and then stay on a floor that the largest single matrix sets: " + ", ".join(facts)
        ),
        traces=traces,
        controls=[
            viz.Control(key="model", label="Model", values=list(models), initial=models[0]),
            viz.Control(
                key="method",
                label="Owners by",
                values=[METHOD_NAMES[m] for m in methods],
                initial=METHOD_NAMES[methods[0]],
            ),
        ],
        rtol=1e-3,
        yaxis_type="log",
        xaxis_type="category",
    )


Box = tuple[int, float, float, str]


def _boxes(
    plan: OwnerPlan, shapes: Sequence[tuple[int, ...]], cost: Cost, scale: float
) -> dict[tuple[int, ...], list[Box]]:
    """Rank, begin, width and name of every matrix, by shape; a rank's shapes in the order of ``shapes``."""
    boxes: dict[tuple[int, ...], list[Box]] = {s: [] for s in shapes}
    shape_of = {m.name: m.shape for m in plan.matrices}
    for rank in range(plan.world_size):
        at = 0.0
        for batch in sorted(plan.batches_of(rank), key=lambda b: (shapes.index(shape_of[b[0]]), natural_key(b[0]))):
            shape = shape_of[batch[0]]
            width = scale * cost.of(shape, len(batch)) / len(batch)
            for name in batch:
                boxes[shape].append((rank, at, width, name))
                at += width
    return boxes


def owners_figure(
    specs: Sequence[MatrixSpec],
    world: int,
    *,
    methods: Sequence[Method] = ("milp", "lpt", "round_robin", "rank0"),
    cost: Cost | None = None,
    title: str = "Who owns what",
) -> Any:
    """Ranks as rows, matrices as boxes as wide as they take, one colour a shape; a control chooses the method.

    Raises:
        ValueError: no matrices, or fewer than two methods.
    """
    if not specs:
        raise ValueError("no matrices: there is nothing to own")
    model_cost = cost or Hardware().owned_cost()
    scale, unit = (1e3, "ms, modelled") if model_cost.unit == "s" else (1e-9, "GFLOP")
    shapes = sorted({m.shape for m in specs}, key=lambda s: (-model_cost.of(s, 1), s))
    rows = [f"rank {r}" for r in range(world)]
    traces, facts, bound = [], [], 0.0
    for method in methods:
        plan = make_plan(specs, world, method=method, cost=model_cost)
        facts.append(f"{METHOD_NAMES[method]} {plan.balance:.2f}")
        bound = max(bound, plan.lower_bound)
        boxes = _boxes(plan, shapes, model_cost, scale)
        for index, (shape, found) in enumerate(boxes.items()):
            traces.append(
                go.Bar(
                    orientation="h",
                    y=[rows[b[0]] for b in found],
                    base=[b[1] for b in found],
                    x=[b[2] for b in found],
                    customdata=[b[3] for b in found],
                    name="x".join(map(str, shape)),
                    marker={
                        "color": viz.SERIES[index % len(viz.SERIES)],
                        "line": {"width": 1, "color": "rgba(127,127,127,0.9)"},
                        "pattern": {"shape": ("", "/", ".")[index // len(viz.SERIES) % 3]},
                    },
                    meta={"method": METHOD_NAMES[method]},
                    hovertemplate="%{y}: %{customdata}, %{x:.3g}<extra></extra>",
                )
            )
    mark = go.Scatter(
        x=[scale * bound] * 2,
        y=[rows[0], rows[-1]],
        mode="lines",
        name="no plan ends sooner",
        line={"color": viz.WORK["idle"], "dash": "dot", "width": 2},
        hoverinfo="name",
    )
    return viz.figure(
        title=title,
        x=f"cost of the matrices that a rank owns ({unit})",
        y="rank",
        alt=(
            f"{len(specs)} matrices as boxes on {world} rows, one row a rank, as wide as their update takes. Fullest "
            f"rank over the mean: {', '.join(facts)}"
        ),
        traces=[*traces, mark],
        controls=[
            viz.Control(
                key="method",
                label="Owners by",
                values=[METHOD_NAMES[m] for m in methods],
                initial=METHOD_NAMES[methods[0]],
            )
        ],
        rtol=1e-3,
        barmode="overlay",
        height=max(320, 170 + 26 * world),
        yaxis={"categoryorder": "array", "categoryarray": rows[::-1], "title": {"text": "rank"}},
    )


PURPOSES: Mapping[str, tuple[str, str]] = {
    "gradients": ("gradients reduced", viz.WORK["backward"]),
    "whole gradients": ("whole gradients to those who update", viz.WORK["optimizer"]),
    "weights": ("weights before use", viz.WORK["forward"]),
    "replicas": ("between replicas", viz.WORK["communication"]),
}


def bytes_figure(world: int = 8, *, shards: int | None = None, micro_batches: Sequence[int] = (1, 2, 4, 8)) -> Any:
    """What a rank sends in a step, by mode and purpose; a slider sets the number of micro-batches.

    Args:
        world: ranks.
        shards: ranks in a shard group of the HSDP modes; default: half of the ranks.
        micro_batches: values of the slider.

    Raises:
        ValueError: shards that do not divide the world.
    """
    group = shards or max(1, world // 2)
    modes: tuple[Mode, ...] = tuple(MODES)  # type: ignore[arg-type]
    traces, top = [], 0.0
    for k in micro_batches:
        parts = {m: wire_parts(m, world, shards=group if "hsdp" in m else None, micro_batches=k) for m in modes}
        top = max(top, *(float(sum(p.values())) for p in parts.values()))
        for purpose, (name, color) in PURPOSES.items():
            traces.append(
                go.Bar(
                    orientation="h",
                    y=[MODES[m] for m in modes],
                    x=[float(parts[m].get(purpose, 0)) for m in modes],
                    name=name,
                    marker={"color": color},
                    meta={"micro_batches": k},
                    hovertemplate="%{y}: %{x:.3g}<extra>" + name + "</extra>",
                )
            )
    first = {
        m: float(sum(wire_parts(m, world).values())) for m in ("gather-keep", "fsdp-keep", "gather-free", "fsdp-free")
    }  # type: ignore[misc]
    return viz.figure(
        title=f"Elements sent in a step, {world} ranks",
        x="sent by a rank (multiples of all matrices)",
        y="mode",
        alt=(
            f"Stacked bars for {len(modes)} modes. With one micro-batch and weights kept, gathering everywhere sends "
            f"{first['gather-keep']:.2f} times the matrices' elements and DMuon {first['fsdp-keep']:.2f}; with weights "
            f"freed {first['gather-free']:.2f} and {first['fsdp-free']:.2f}. More micro-batches add spreads of weights "
            "to both alike."
        ),
        traces=traces,
        controls=[
            viz.Control(
                key="micro_batches",
                label="Micro-batches in a step",
                values=list(micro_batches),
                initial=micro_batches[0],
                kind="range",
            )
        ],
        barmode="stack",
        height=460,
        xaxis_range=[0, 1.05 * top],
        yaxis={"autorange": "reversed", "title": {"text": "mode"}},
    )


def overlap_figure(
    plan: OwnerPlan,
    layers: Sequence[Sequence[str]],
    network: NetworkModel,
    *,
    compute_ms: Sequence[float] = (5, 10, 20, 40),
    title: str = "New weights travel behind the layer before",
) -> Any:
    """One rank's link and its compute over the forward pass of some layers; a slider sets the time of a layer.

    Args:
        plan: owners.
        layers: names of each layer's matrices, in the order of use.
        network: one rank's link.
        compute_ms: milliseconds of one layer's forward pass, the choices of the slider.
        title: of the figure.

    Times are modelled by :func:`dist_lib.dmuon.cost_model.overlap`.

    Raises:
        ValueError: no layers, or fewer than two times.
    """
    if not layers or len(compute_ms) < 2:
        raise ValueError(f"{len(layers)} layers and {len(compute_ms)} times: need at least one layer and two times")
    names = {"communication": "weights travel", "forward": "layer computes", "idle": "layer waits for weights"}
    traces, facts = [], []
    for ms in compute_ms:
        times, free = overlap(plan, layers, ms / 1e3, network), 0.0
        spans: list[tuple[str, float, float, str]] = []
        for t in times:
            spans += [("link", 1e3 * t.send_begin, 1e3 * t.send_end, "communication")]
            spans += [("compute", 1e3 * free, 1e3 * t.compute_begin, "idle")] if t.compute_begin > free else []
            spans += [("compute", 1e3 * t.compute_begin, 1e3 * t.compute_end, "forward")]
            free = t.compute_end
        waited = sum(end - begin for _, begin, end, kind in spans if kind == "idle")
        facts.append(f"{waited:.0f} ms with {ms:g} ms a layer")
        traces += viz.timeline(spans, labels=names, meta={"ms": ms})
    for trace in traces:  # a layer ends where the next one begins
        trace.update(marker_line={"width": 1, "color": "rgba(127,127,127,0.9)"})
    return viz.figure(
        title=title,
        x=f"time from the start of the forward pass (ms, modelled, first {len(layers)} layers)",
        y="resource",
        alt=(
            f"Two rows over time for {len(layers)} layers: the link sends a layer's weights while the layer before it "
            f"computes. Waiting in all: {', '.join(facts)}"
        ),
        traces=traces,
        controls=[
            viz.Control(key="ms", label="Forward of a layer (ms)", values=list(compute_ms), initial=compute_ms[1])
        ],
        rtol=1e-6,
        barmode="overlay",
        height=360,
        yaxis={"categoryorder": "array", "categoryarray": ["compute", "link"], "title": {"text": "resource"}},
    )


def reproduction_figure(rows: Sequence[Row] | None = None) -> Any:
    """Modelled over published times, a point for each published number; on the diagonal they agree."""
    found = list(rows or reproduction_table())
    kinds = {
        "gather": "gathered, all on every rank",
        "ddp": "all-reduced, all on every rank",
        "naive-replay": "updates alone, all on one rank",
        "dmuon": "owners",
        "owned-replay": "updates alone, owners",
    }
    traces = []
    for index, (system, name) in enumerate(kinds.items()):
        mine = [r for r in found if r.published.system == system]
        if mine:
            traces.append(
                go.Scatter(
                    x=[r.published.milliseconds for r in mine],
                    y=[r.modelled_ms for r in mine],
                    mode="markers",
                    name=name,
                    marker={"color": viz.SERIES[index], "size": 10, "symbol": index},
                    customdata=[
                        [f"{r.published.label}, {r.published.world} GPUs, {r.published.quantity}", f"{r.error:+.0%}"]
                        for r in mine
                    ],
                    hovertemplate="%{customdata[0]}: %{x:.4g} published, %{y:.4g} modelled, %{customdata[1]}",
                )
            )
    low, high = 0.6 * min(r.published.milliseconds for r in found), 1.6 * max(r.published.milliseconds for r in found)
    traces.append(
        go.Scatter(
            x=[low, high],
            y=[low, high],
            mode="lines",
            name="equal",
            line={"color": viz.WORK["idle"], "dash": "dot", "width": 2},
            hoverinfo="skip",
        )
    )
    within = sum(abs(r.error) <= 0.3 for r in found)
    return viz.figure(
        title="Modelled and published times",
        x="published (ms)",
        y="modelled (ms)",
        alt=(
            f"{len(found)} points near a diagonal on logarithmic axes from {low:.0f} to {high:.0f} ms; {within} are "
            "within 30 percent of the published time. The others, models of many small matrices on 8 GPUs, come out "
            "short."
        ),
        traces=traces,
        rtol=1e-3,
        xaxis_type="log",
        yaxis_type="log",
    )
