"""A memory question answered as data and as text: what a layer keeps, what devices hold, what would fit on a GPU.

Everything comes from :mod:`dist_lib.agoq.memory_model`; GB are 10^9 bytes, GiB 2^30. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dist_lib.agoq.bit_plan import RULES
from dist_lib.agoq.layer_memory import COLUMNS, LayerShape, Layout, by_column
from dist_lib.agoq.memory_model import (
    SYSTEM_NAMES,
    SYSTEMS,
    System,
    Training,
    fewest_recomputed,
    longest_sequence,
    peak,
    plan_bits,
    stage_memory,
)
from dist_lib.agoq.paper_tables import layer_table, memory_table, recompute_table, saving_table
from dist_lib.agoq.published import INCONSISTENCIES
from dist_lib.agoq.speed_model import published_speed, speed_table
from dist_lib.commands import table
from dist_lib.models import parameter_counts

GPUS: Mapping[str, int] = {
    "t4": 16,
    "l4": 24,
    "4090": 24,
    "a100-40": 40,
    "a6000": 48,
    "ascend-910b": 64,
    "a100": 80,
    "h100": 80,
    "rtx-pro-6000": 96,
    "h200": 140,
}
"""Nominal GiB of a device."""
SHOWN: tuple[Layout, ...] = ("bf16", "coat", "paper", "shared")


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}"


def memory_report(
    training: Training, systems: Mapping[str, System] | None = None, *, capacity: int | None = None
) -> dict[str, Any]:
    """All numbers, ready for JSON; bytes are whole numbers.

    Args:
        training: what is trained.
        systems: by name; default: :data:`~dist_lib.agoq.memory_model.SYSTEMS`.
        capacity: bytes that a device has for training; adds what would fit.

    Raises:
        BudgetError: a rule's plan that does not fit.
    """
    t, chosen = training, dict(SYSTEMS if systems is None else systems)
    shape = t.shape or LayerShape.of(t.config)
    scale = System().scale_bits
    layer = {x: {c: round(u * t.unit) for c, u in by_column(x, shape, scale_bits=scale).items()} for x in SHOWN}
    devices = {}
    for name, system in chosen.items():
        stages = stage_memory(t, system)
        fullest = peak(stages)
        devices[name] = {
            "name": SYSTEM_NAMES.get(name, name),
            "stages": [_stage(m) for m in stages],
            "fullest_stage": fullest.stage,
            "peak_bytes": fullest.total,
        }
        if capacity is not None:
            devices[name] |= {
                "fits": fullest.total <= capacity,
                "recomputed_layers": fewest_recomputed(t, system, capacity),
                "longest_sequence": longest_sequence(t, system, capacity),
            }
    return {
        "parameters": parameter_counts(t.config).total,
        "layers": t.config.n_layers,
        "seq": t.seq,
        "micro_batch": t.micro_batch,
        "micro_batches": t.micro_batches,
        "tensor": t.tensor,
        "stages": t.stages,
        "chunks": t.chunks,
        "data": t.data,
        "devices": t.tensor * t.stages * t.data,
        "unit_bytes": float(t.unit),
        "layer_bytes": layer,
        "capacity_bytes": capacity,
        "systems": devices,
    }


def _stage(m: Any) -> dict[str, Any]:
    return {
        "stage": m.stage,
        "in_flight": m.in_flight,
        "bits": list(m.bits),
        "bytes": dict(m.parts),
        "total_bytes": m.total,
    }


def memory_text(report: Mapping[str, Any], model: str) -> str:
    """The report for a terminal."""
    r = report
    parts = [
        f"{model}: {r['parameters'] / 1e9:.2f} billion parameters, {r['layers']} layers; sequences of {r['seq']} "
        f"tokens, {r['micro_batches']} micro-batches of {r['micro_batch']}\n"
        f"{r['devices']} devices: tensor {r['tensor']} x stages {r['stages']} (chunks: {r['chunks']}) x data "
        f"{r['data']}\nModelled: fragments, workspaces and buffers come on top. GB are 10^9 bytes."
    ]
    columns = [(c, *(f"{r['layer_bytes'][x][c] / 1e6:.1f}" for x in SHOWN)) for c in COLUMNS]
    columns.append(("total", *(f"{sum(r['layer_bytes'][x].values()) / 1e6:.1f}" for x in SHOWN)))
    parts.append(table(("one layer, one micro-batch, one rank (MB)", *SHOWN), columns))
    kinds = list(next(iter(r["systems"].values()))["stages"][0]["bytes"])
    rows = []
    for d in r["systems"].values():
        fullest = d["stages"][d["fullest_stage"]]
        cells = [_gb(fullest["bytes"][k]) for k in kinds]
        rows.append((d["name"], str(d["fullest_stage"] + 1), *cells, _gb(d["peak_bytes"])))
    parts.append(table(("fullest device (GB)", "stage", *kinds, "total"), rows))
    coded = [d for d in r["systems"].values() if d["stages"][0]["bits"]]
    rows = [(d["name"], *("/".join(map(str, m["bits"])) for m in d["stages"])) for d in coded]
    if rows and r["stages"] > 1:
        parts.append(table(("bits of activations", *(f"stage {i + 1}" for i in range(r["stages"]))), rows))
    if r["capacity_bytes"] is not None:
        rows = [
            (
                d["name"],
                "yes" if d["fits"] else "no",
                "none fits" if d["recomputed_layers"] is None else str(d["recomputed_layers"]),
                str(d["longest_sequence"]) if d["longest_sequence"] else "none",
            )
            for d in r["systems"].values()
        ]
        head = (
            f"in {r['capacity_bytes'] / 2**30:g} GiB ({_gb(r['capacity_bytes'])} GB)",
            "fits",
            "layers of a stage to recompute",
            "longest sequence",
        )
        parts.append(table(head, rows))
    return "\n\n".join(parts) + "\n"


def bits_report(training: Training, layout: Layout) -> dict[str, Any]:
    """What every rule gives the stages, with what they then hold, ready for JSON.

    Raises:
        ValueError: a layout that encodes nothing.
    """
    base = replace(SYSTEMS["shared"], layout=layout)
    if not base.encodes:
        raise ValueError(f"layout {layout!r} encodes nothing, so stages have no bits: take table1, paper or shared")
    limit = peak(stage_memory(training, base)).total
    rules = {}
    for rule in RULES:
        system = replace(base, rule=rule)
        stages, plan = stage_memory(training, system), plan_bits(training, system)
        rules[rule] = {
            "stages": [_stage(m) for m in stages],
            "peak_bytes": peak(stages).total,
            "layers": list(plan.bits) if plan is not None else [],
        }
    return {"layout": layout, "peak_at_4_bits_bytes": limit, "rules": rules}


def bits_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    stages = next(iter(report["rules"].values()))["stages"]
    parts = [
        f"layout {report['layout']}; in flight, first stage first: {', '.join(str(s['in_flight']) for s in stages)}\n"
        f"fullest stage with 4 bits everywhere: {_gb(report['peak_at_4_bits_bytes'])} GB"
    ]
    rows = []
    for rule, found in report["rules"].items():
        cells = ["/".join(map(str, s["bits"])) + f" ({_gb(s['total_bytes'])})" for s in found["stages"]]
        rows.append((rule, *cells, f"{found['peak_bytes'] / report['peak_at_4_bits_bytes'] - 1:+.1%}"))
    head = ("bits (GB)", *(f"stage {s['stage'] + 1}" for s in stages), "peak")
    return "\n\n".join([*parts, table(head, rows)]) + "\n"


def paper_report() -> dict[str, Any]:
    """The paper's tables with ours and the error of each number, ready for JSON."""
    return {
        "table 1": [
            {"layout": r.layout, "column": r.column, "published": r.published, "counted": float(r.counted)}
            for r in layer_table()
        ],
        "table 2": [
            {
                "seq": r.row.seq,
                "published": r.measured,
                "recomputed": r.row.megatron_recomputed,
                "modelled": r.modelled,
                "error": r.error,
                "recomputed_from_memory": m.recomputed,
                "from_memory": m.speedup,
                "from_memory_error": m.error,
            }
            for r, m in zip(speed_table(), recompute_table(), strict=True)
        ],
        "tables 8 and 14": [
            {
                "place": r.row.place,
                "systems": r.row.systems,
                "published_gb": r.row.gigabytes,
                "modelled_gb": r.modelled,
                "table_1_shape_gb": r.table_1_shape,
                "built_gb": r.built,
                "error": r.error,
                "note": r.row.note,
            }
            for r in memory_table()
        ],
        "saved": [
            {
                "place": r.place,
                "technique": r.technique,
                "published_gb": r.published,
                "modelled_gb": r.modelled,
                "error": r.error,
            }
            for r in saving_table()
        ],
        "inconsistencies": [{"place": i.place, "printed": i.printed, "found": i.found} for i in INCONSISTENCIES],
    }


def paper_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    speed = published_speed()
    exact = sum(r["published"] == r["counted"] for r in report["table 1"])
    rows = [
        (
            f"{r['seq'] // 1024}K",
            f"{r['published']:.3f}",
            str(r["recomputed"]),
            f"{r['modelled']:.3f}",
            f"{r['error']:+.1%}",
            str(r["recomputed_from_memory"]),
            f"{r['from_memory']:.3f}",
            f"{r['from_memory_error']:+.1%}",
        )
        for r in report["table 2"]
    ]
    head = ("table 2", "published", "recomputed", "modelled", "error", "from memory", "modelled", "error")
    formula = f"(1 + {speed.forward_share:.3f} recomputed / 10) / {speed.overhead:.4f}"
    memory = [
        (
            f"{r['place']}, {r['systems']}",
            f"{r['published_gb']:.1f}",
            f"{r['modelled_gb']:.1f}",
            f"{r['error']:+.1%}",
            f"{r['table_1_shape_gb']:.1f}",
            f"{r['built_gb']:.1f}",
        )
        for r in report["tables 8 and 14"]
    ]
    saved = [
        (
            f"{r['place']}, {r['technique']}",
            f"{r['published_gb']:.1f}",
            f"{r['modelled_gb']:.1f}",
            f"{r['error']:+.1%}",
        )
        for r in report["saved"]
    ]
    parts = [
        f"table 1: {exact} of {len(report['table 1'])} numbers counted as printed",
        f"speed-up = {formula}\n" + table(head, rows),
        table(("peak (GB)", "published", "modelled", "error", "shape of table 1", "as it can be built"), memory),
        table(("saved (GB)", "published", "modelled", "error"), saved),
        "\n".join(f"{i['place']}: {i['printed']}\n    {i['found']}" for i in report["inconsistencies"]),
    ]
    return "\n\n".join(parts) + "\n"
