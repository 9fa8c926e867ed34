"""Pictures of the memory model: tensors of a layer, kinds of memory on a device, stages with bits, the paper's tables.

Needs plotly (the ``viz`` extra). The numbers are those of the memory, bit-plan and speed models; this module only draws
them. Nothing in them is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import plotly.graph_objects as go

from dist_lib import viz
from dist_lib.agoq.bit_plan import RULES, Rule
from dist_lib.agoq.layer_memory import LAYOUT_NAMES, LayerShape, Layout, layer_units, tensors
from dist_lib.agoq.memory_model import (
    SYSTEM_NAMES,
    SYSTEMS,
    StageMemory,
    System,
    Training,
    peak,
    plan_bits,
    stage_memory,
)
from dist_lib.agoq.paper_tables import memory_table, recompute_table
from dist_lib.agoq.speed_model import speed_table
from dist_lib.models import get_config

GROUPS: Mapping[str, tuple[str, ...]] = {
    "queries, keys, values": ("queries, keys and values", "rotated queries", "rotated keys", "values"),
    "attention's output": ("attention output", "input of the out-projection"),
    "norms' inputs": ("input of norm 1", "input of norm 2"),
    "norms' outputs": ("output of norm 1", "output of norm 2"),
    "gate and up": ("gate and up",),
    "SiLU and product": ("SiLU of gate", "SiLU of gate, times up"),
}
SCALE_BITS = Fraction(32, 128)
KINDS: Mapping[str, str] = {
    "weights": viz.WORK["forward"],
    "gradients": viz.WORK["backward"],
    "master weights": viz.WORK["stale"],
    "moments": viz.WORK["optimizer"],
    "activations": viz.PAPER["agoq"],
    "head": viz.WORK["communication"],
}
RULE_NAMES: Mapping[Rule | None, str] = {
    None: "4 bits everywhere",
    "paper": "the paper's",
    "floor": "rounded down",
    "release": "the release's",
    "budget": "whole budget",
}


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}K"


def _groups(layouts: Sequence[Layout], shape: LayerShape, unit: Fraction, state: Mapping[str, Any]) -> list[Any]:
    """One set of bars for each group of tensors, GB."""
    traces = []
    for index, (group, names) in enumerate(GROUPS.items()):
        units = [sum(h.units(4, SCALE_BITS) for h in tensors(x, shape) if h.name in names) for x in layouts]
        traces.append(
            go.Bar(
                orientation="h",
                y=[LAYOUT_NAMES[x] for x in layouts],
                x=[float(u * unit) / 1e9 for u in units],
                name=group,
                marker={"color": viz.SERIES[index]},
                meta=dict(state),
                hovertemplate="%{y}: %{x:.3g} GB<extra>" + group + "</extra>",
            )
        )
    return traces


def layer_figure(
    models: Sequence[str] = ("llama2-13b", "llama3-8b", "codellama-34b"),
    sequences: Sequence[int] = (8192, 32_768, 131_072),
    tensor: Sequence[int] = (1, 4, 8),
    *,
    layouts: Sequence[Layout] = ("bf16", "coat", "paper", "shared"),
) -> Any:
    """What all layers of a model keep for one micro-batch, by tensor and layout.

    Controls choose model, sequence and ranks of tensor parallelism. Bars are for one rank, scales included.
    """
    traces, facts = [], []
    for model in models:
        config = get_config(model)
        shape = LayerShape.of(config)
        before, after = (layer_units(x, shape, scale_bits=SCALE_BITS) for x in (layouts[0], layouts[-1]))
        facts.append(f"{model} {float(before / after):.2f} times")
        for seq in sequences:
            for ranks in tensor:
                unit = Fraction(2 * seq * config.d_model * config.n_layers, ranks)
                state = {"model": model, "seq": _thousands(seq), "tensor": ranks}
                traces += _groups(layouts, shape, unit, state)
    return viz.figure(
        title="What the layers keep for one backward pass",
        x="GB on one rank, all layers, one sequence",
        y="layout",
        alt=(
            "Stacked bars of what a model's layers keep, by tensor. In BF16 gate, up and what follows them take most; "
            "in the last row, attention's own tensors do. All layers together shrink: " + ", ".join(facts)
        ),
        traces=traces,
        controls=[
            viz.Control(key="model", label="Model", values=list(models), initial=models[0]),
            viz.Control(
                key="seq",
                label="Sequence (tokens)",
                values=[_thousands(s) for s in sequences],
                initial=_thousands(sequences[0]),
                kind="range",
            ),
            viz.Control(
                key="tensor", label="Tensor-parallel ranks", values=list(tensor), initial=tensor[-1], kind="range"
            ),
        ],
        rtol=1e-6,
        barmode="stack",
        yaxis={"autorange": "reversed", "title": {"text": "layout"}},
    )


def _kinds(found: Sequence[StageMemory], names: Sequence[str], *, horizontal: bool, **more: Any) -> list[Any]:
    traces = []
    for kind, color in KINDS.items():
        sizes = [m.parts[kind] / 1e9 for m in found]
        pair = {"x": sizes, "y": list(names), "orientation": "h"} if horizontal else {"x": list(names), "y": sizes}
        value = "%{x:.3g}" if horizontal else "%{y:.3g}"
        traces.append(
            go.Bar(
                name=kind, marker={"color": color}, hovertemplate=value + f" GB<extra>{kind}</extra>", **pair, **more
            )
        )
    return traces


def device_figure(training: Training, *, systems: Mapping[str, System] = SYSTEMS, capacity: int | None = None) -> Any:
    """The fullest stage's device by kind of memory, a bar for each system; a line where a GPU ends.

    Args:
        training: what is trained.
        systems: by name.
        capacity: bytes of a GPU.
    """
    found = [peak(stage_memory(training, s)) for s in systems.values()]
    names = [SYSTEM_NAMES.get(n, n) for n in systems]
    traces = _kinds(found, names, horizontal=True)
    if capacity is not None:
        traces.append(
            go.Scatter(
                x=[capacity / 1e9] * 2,
                y=[names[0], names[-1]],
                mode="lines",
                name="the GPU ends here",
                line={"color": viz.WORK["idle"], "dash": "dot", "width": 2},
                hoverinfo="name",
            )
        )
    totals = ", ".join(f"{n} {m.total / 1e9:.1f}" for n, m in zip(names, found, strict=True))
    return viz.figure(
        title="Memory of the fullest device",
        x="GB",
        y="system",
        alt=f"Stacked bars of a device's memory by kind, in GB: {totals}",
        traces=traces,
        rtol=1e-6,
        barmode="stack",
        yaxis={"autorange": "reversed", "title": {"text": "system"}},
    )


_QUIET: Mapping[str, Any] = {"color": viz.WORK["idle"], "hovertemplate": "%{y:.3g} GB"}


def _labels(found: Sequence[StageMemory], names: Sequence[str], bits: Sequence[str], state: Mapping[str, Any]) -> Any:
    """What is in flight and the bits, above the bars."""
    return go.Scatter(
        x=list(names),
        y=[m.total / 1e9 for m in found],
        mode="text",
        text=[f"{m.in_flight} in flight, {b} bits" for m, b in zip(found, bits, strict=True)],
        textposition="top center",
        name="in flight, bits",
        showlegend=False,
        meta=dict(state),
        hoverinfo="skip",
    )


def stages_figure(
    training: Training, *, layout: Layout = "paper", chunks: Sequence[int] = (1, 2), rules: Sequence[Rule] = RULES
) -> Any:
    """Stages with what they hold, how many micro-batches are in flight and with how many bits they are kept.

    Controls choose rule and chunks a stage. The dotted line is the fullest stage with 4 bits everywhere.

    Raises:
        ValueError: a layout that encodes nothing; sizes that do not fit together.
    """
    base = replace(SYSTEMS["paper"], layout=layout)
    if not base.encodes:
        raise ValueError(f"layout {layout!r} encodes nothing, so stages have no bits: take table1, paper or shared")
    top, traces, facts = 0.0, [], list[str]()
    initial = RULE_NAMES["paper"] if "paper" in rules else RULE_NAMES[rules[0]]
    for v in chunks:
        t = replace(training, chunks=v)
        limit = peak(stage_memory(t, base)).total / 1e9
        for rule in (None, *rules):
            system = replace(base, rule=rule)
            found, plan = stage_memory(t, system), plan_bits(t, system)
            state = {"rule": RULE_NAMES[rule], "chunks": v}
            top = max(top, peak(found).total / 1e9)
            names = [f"stage {m.stage + 1}" for m in found]
            traces += _kinds(found, names, horizontal=False, meta=state)
            bits = [" and ".join(map(str, plan.bits_of_stage(m.stage) if plan else (4,))) for m in found]
            if v == chunks[0] and rule in ("paper", "budget"):
                facts.append(f"{RULE_NAMES[rule]} bits {', '.join(bits)}")
            traces.append(_labels(found, names, bits, state))
        traces.append(
            viz.line(names, [limit] * t.stages, "peak with 4 bits everywhere", index=2, **_QUIET, meta={"chunks": v})
        )
    held = ", ".join(str(m.in_flight) for m in stage_memory(replace(training, chunks=chunks[0]), base))
    return viz.figure(
        title="Stages that hold less may keep more bits",
        x="pipeline stage",
        y="GB on one device",
        alt=(
            f"Stacked bars of memory by stage. Micro-batches in flight with {chunks[0]} chunk a stage: {held}, so that "
            f"later stages have room under the first one's peak; {'; '.join(facts)}"
        ),
        traces=traces,
        controls=[
            viz.Control(
                key="rule",
                label="Bits by rule",
                values=[RULE_NAMES[r] for r in (None, *rules)],
                initial=initial,
            ),
            *(
                [viz.Control(key="chunks", label="Chunks a stage", values=list(chunks), initial=chunks[0])]
                if len(chunks) > 1
                else []
            ),
        ],
        rtol=1e-6,
        barmode="stack",
        yaxis_range=[0, 1.12 * top],
    )


def published_figure() -> Any:
    """Tables 8 and 14: published peaks beside modelled ones, with the shape of the model and with the table's."""
    rows = memory_table()
    names = [f"{r.row.place}, {r.row.systems.upper()}" for r in rows]
    series = (
        ("published", [r.row.gigabytes for r in rows], viz.PAPER["baseline"]),
        ("modelled", [r.modelled for r in rows], viz.PAPER["agoq"]),
        ("modelled, shape of table 1", [r.table_1_shape for r in rows], viz.WORK["forward"]),
    )
    errors = [r.error for r in rows]
    return viz.figure(
        title="Published and modelled peaks",
        x="GB",
        y="row",
        alt=(
            f"{len(rows)} groups of bars. Modelled peaks lie {min(errors):.0%} to {max(errors):+.0%} from the "
            "published ones; those of NPUs are all higher than the model, which leaves out the runtime and fragments."
        ),
        traces=[
            go.Bar(orientation="h", y=names, x=values, name=name, marker={"color": color})
            for name, values, color in series
        ],
        rtol=1e-6,
        barmode="group",
        height=640,
        yaxis={"autorange": "reversed", "title": {"text": "row"}},
    )


def speed_figure() -> Any:
    """Table 2: the published speed-up, that from the layers recomputed there, and that from memory alone."""
    rows, alone = speed_table(), recompute_table()
    x = [_thousands(r.row.seq) for r in rows]
    worst = max(rows, key=lambda r: abs(r.error))
    return viz.figure(
        title="The speed-up is recomputation that is not needed",
        x="sequence (tokens)",
        y="times faster than the baseline",
        alt=(
            f"Three rising lines over the sequence. Published: {rows[0].measured:.2f} to {rows[-1].measured:.2f}. From "
            f"the layers that the baseline computes again: {rows[0].modelled:.2f} to {rows[-1].modelled:.2f}, at most "
            f"{abs(worst.error):.0%} off, at {_thousands(worst.row.seq)}. From a memory model alone: "
            f"{alone[0].speedup:.2f} to {alone[-1].speedup:.2f}."
        ),
        traces=[
            viz.line(x, [r.measured for r in rows], "published", color=viz.PAPER["baseline"]),
            viz.line(x, [r.modelled for r in rows], "from its recomputed layers", index=1, color=viz.PAPER["agoq"]),
            viz.line(x, [r.speedup for r in alone], "from memory alone", index=2),
        ],
        rtol=1e-6,
        xaxis_type="category",
    )
