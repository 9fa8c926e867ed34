"""What a plan means for a step, as data and as text: loads, bytes, memory and modelled times.

The times come from :mod:`dist_lib.dmuon.cost_model` and are modelled; loads, bytes and memory follow from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from dist_lib.comm import NetworkModel
from dist_lib.commands import table
from dist_lib.dmuon.bytes import MODES, MemoryBytes, Mode, Sizes, step_memory, step_payload, wire_share
from dist_lib.dmuon.cost_model import Hardware, exposed_seconds, saturation_ranks, times_of_plan
from dist_lib.dmuon.costs import Cost
from dist_lib.dmuon.layout import layer_of
from dist_lib.dmuon.plan import OwnerPlan
from dist_lib.dmuon.workloads import shape_counts

_ROWS = 16  # ranks shown one by one


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is judged under.

    Attributes:
        mode: see :data:`~dist_lib.dmuon.bytes.MODES`.
        sizes: of elements, and how often weights are spread.
        hardware: rates of a rank.
        network: one rank's link.
        rest: elements of parameters that are no matrices.
        nodes: ranks are numbered node by node.
        compute_s: forward pass of one layer, to hide weights behind; 0 hides nothing.
    """

    mode: Mode = "ddp"
    sizes: Sizes = field(default_factory=lambda: Sizes(weight=2, gradient=4))
    hardware: Hardware = field(default_factory=Hardware)
    network: NetworkModel = field(default_factory=lambda: NetworkModel(20e-6, 25e9))
    rest: int = 0
    nodes: int = 1
    compute_s: float = 0.0


def plan_report(plan: OwnerPlan, setting: Setting | None = None, *, cost: Cost | None = None) -> dict[str, Any]:
    """All numbers of a plan, ready for JSON.

    Args:
        plan: owners and batches.
        setting: default: DDP on A800 machines.
        cost: in seconds, for the times; default: from the setting's hardware.
    """
    s = setting or Setting()
    seconds = cost if cost is not None and cost.unit == "s" else s.hardware.owned_cost()
    times = times_of_plan(plan, cost=seconds, rest=s.rest, hardware=s.hardware, gradient_bytes=s.sizes.weight)
    payload, memory = step_payload(s.mode, plan, s.sizes), step_memory(s.mode, plan, s.sizes)
    elements, gpus = sum(plan.elements_per_rank), plan.world_size // s.nodes
    layers: dict[str, list[str]] = {}
    for m in plan.matrices:
        layers.setdefault(layer_of(m.name), []).append(m.name)
    reduce_s = sum(s.network.reduce(s.sizes.gradient * n, plan.world_size) for n in _layer_elements(plan))
    shards = s.sizes.columns(plan.world_size)
    share = wire_share(s.mode, plan.world_size, shards=shards, micro_batches=s.sizes.micro_batches)
    return {
        "matrices": len(plan.matrices),
        "elements": elements,
        "shapes": {"x".join(map(str, shape)): n for shape, n in shape_counts(plan.matrices).items()},
        "world_size": plan.world_size,
        "nodes": s.nodes,
        "method": plan.method,
        "cost": plan.cost,
        "unit": plan.unit,
        "loads": {
            "largest": max(plan.rank_loads),
            "mean": sum(plan.rank_loads) / plan.world_size,
            "lower_bound": plan.lower_bound,
            "balance": plan.balance,
            "above_bound": plan.above_bound,
            "ranks_without_matrices": sum(1 for r in range(plan.world_size) if not plan.owned_by(r)),
            "saturates_at_ranks": saturation_ranks(plan.matrices, seconds) if plan.matrices else 0.0,
        },
        "ranks": _ranks(plan, memory, gpus),
        "mode": s.mode,
        "payload_bytes": {op: max(p.get(op, 0) for p in payload) for op in sorted({o for p in payload for o in p})},
        "sent_elements_share": float(share),
        "memory_bytes": {key: max(getattr(m, key) for m in memory) for key in _MEMORY},
        "seconds": {
            **{key: value for key, value in asdict(times).items() if key != "floor"},
            "dmuon": times.dmuon,
            "gathering": times.gathering,
            "speedup": times.speedup,
            "reduce": reduce_s,
            "publish_exposed": exposed_seconds(
                plan, list(layers.values()), s.compute_s, s.network, itemsize=s.sizes.weight
            ),
        },
    }


def _ranks(plan: OwnerPlan, memory: Sequence[MemoryBytes], gpus: int) -> list[dict[str, Any]]:
    return [
        {
            "rank": r,
            "node": r // gpus,
            "gpu": r % gpus,
            "matrices": len(plan.owned_by(r)),
            "batches": len(plan.batches_of(r)),
            "load": plan.rank_loads[r],
            "state_bytes": memory[r].state,
        }
        for r in range(plan.world_size)
    ]


_MEMORY = ("master", "momentum", "weights", "gradients", "total")


def _layer_elements(plan: OwnerPlan) -> list[int]:
    found: dict[str, int] = {}
    for m in plan.matrices:
        found[layer_of(m.name)] = found.get(layer_of(m.name), 0) + m.numel
    return list(found.values())


def _load(value: float, unit: str) -> str:
    return f"{1e3 * value:.3f} ms" if unit == "s" else f"{value / 1e12:.4g} TFLOP"


def _gb(value: float) -> str:
    return f"{value / 1e9:.3f} GB" if value >= 1e7 else f"{value / 1e3:.1f} kB"


def plan_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    loads, unit, ranks = report["loads"], report["unit"], report["ranks"]
    shapes = ", ".join(f"{n} of {s}" for s, n in report["shapes"].items())
    parts = [
        f"{report['matrices']} matrices, {report['elements'] / 1e9:.3f} billion elements: {shapes}",
        f"{report['world_size']} ranks, nodes: {report['nodes']}; owners by {report['method']}, cost {report['cost']}",
    ]
    parts.append(
        table(
            ("load", ""),
            [
                ("fullest rank", _load(loads["largest"], unit)),
                ("mean", _load(loads["mean"], unit)),
                ("lower bound of any plan", _load(loads["lower_bound"], unit)),
                ("fullest over mean", f"{loads['balance']:.3f}"),
                ("fullest over bound", f"{loads['above_bound']:.4f}"),
                ("ranks without matrices", str(loads["ranks_without_matrices"])),
                ("one matrix sets the time beyond", f"{loads['saturates_at_ranks']:.0f} ranks"),
            ],
        )
    )
    if len(ranks) <= _ROWS:
        rows = [
            (
                f"{r['rank']} ({r['node']}:{r['gpu']})",
                str(r["matrices"]),
                str(r["batches"]),
                _load(r["load"], unit),
                _gb(r["state_bytes"]),
            )
            for r in ranks
        ]
        parts.append(table(("rank (node:GPU)", "matrices", "batches", "load", "state"), rows))
    else:
        rows = []
        for name, pick in (("least", min), ("median", median), ("most", max)):
            count, batches, load, size = (pick([r[k] for r in ranks]) for k in _COLUMNS)
            rows.append((name, f"{count:g}", f"{batches:g}", _load(load, unit), _gb(size)))
        parts.append(table(("over ranks, each column apart", "matrices", "batches", "load", "state"), rows))
    payload = [(op, _gb(n)) for op, n in report["payload_bytes"].items()]
    payload.append(("elements sent, of all matrices'", f"{report['sent_elements_share']:.3f}"))
    parts.append(table((f"bytes a step and rank, {MODES[report['mode']]}", "payload"), payload))
    parts.append(table(("memory of a rank, at most", ""), [(k, _gb(n)) for k, n in report["memory_bytes"].items()]))
    times = [(label, f"{1e3 * report['seconds'][key]:.2f} ms") for key, label in _TIMES.items()]
    times.append(("gathering over owners", f"{report['seconds']['speedup']:.1f}"))
    parts.append(table(("time, modelled", ""), times))
    return "\n\n".join(parts) + "\n"


_COLUMNS = ("matrices", "batches", "load", "state_bytes")
_TIMES = {
    "owned": "Newton-Schulz, fullest owner",
    "memory": "element-wise updates",
    "fixed": "fixed",
    "dmuon": "optimizer with owners",
    "every_rank": "Newton-Schulz of all matrices on every rank",
    "gather": "gathering gradients",
    "gathering": "optimizer that gathers everywhere",
    "reduce": "reducing gradients, nothing hidden",
    "publish_exposed": "publishing weights, not hidden",
}
