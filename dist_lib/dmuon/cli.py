"""``python -m dist_lib.dmuon``: what a plan would give, before anything is trained.

Each sub-command is a function that adds its parser and sets ``run``, which takes the parsed arguments and returns what
to print. Errors of the caller go to standard error with exit status 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from dist_lib.comm import NetworkModel
from dist_lib.commands import Add, run_command
from dist_lib.dmuon.bytes import Mode, Sizes
from dist_lib.dmuon.cost_model import Hardware, a800_cost
from dist_lib.dmuon.costs import Cost, FlopCost, MeasuredCost
from dist_lib.dmuon.plan import MatrixSpec, Method, make_plan, matrix_specs
from dist_lib.dmuon.plan_report import Setting, plan_report, plan_text
from dist_lib.dmuon.verify import add_verify
from dist_lib.dmuon.workloads import WORKLOADS, workload
from dist_lib.models import CONFIGS, parameter_counts, training_flops


def _matrices(args: argparse.Namespace) -> tuple[MatrixSpec, ...]:
    if args.matrices is None:
        return workload(args.model)
    data = json.loads(args.matrices.read_text())
    if not isinstance(data, dict) or not all(isinstance(s, list) for s in data.values()):
        raise ValueError(f'{args.matrices}: need a JSON object of names and shapes, such as {{"layers.0.w": [64, 32]}}')
    return matrix_specs([(name, tuple(shape)) for name, shape in data.items()])


def _measured(path: Path) -> MeasuredCost:
    """Read ``{"64x32": seconds}`` or ``{"64x32": {"1": seconds, "8": seconds}}``."""
    data = json.loads(path.read_text())
    times: dict[tuple[int, ...], float | Mapping[int, float]] = {}
    try:
        for key, value in data.items():
            shape = tuple(int(n) for n in key.split("x"))
            times[shape] = {int(b): float(t) for b, t in value.items()} if isinstance(value, dict) else float(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: need times in seconds by shape, such as {{"64x32": 0.001}}: {error}') from error
    return MeasuredCost.from_mapping(times)


def _cost(args: argparse.Namespace, specs: Sequence[MatrixSpec], hardware: Hardware) -> Cost:
    if args.cost == "flops":
        return FlopCost(batch=args.max_batch)
    if args.cost == "device":
        return hardware.owned_cost(batch=args.max_batch)
    if args.cost == "a800":
        return a800_cost(hardware, specs)
    if not Path(args.cost).is_file():
        raise ValueError(f"cost {args.cost!r}: allowed are flops, device, a800, or a JSON file with measured times")
    return _measured(Path(args.cost))


def run_plan(args: argparse.Namespace) -> str:
    """Make a plan and describe it."""
    specs, hardware = _matrices(args), Hardware(peak_flops=1e12 * args.peak_tflops)
    cost = _cost(args, specs, hardware)
    plan = make_plan(
        specs,
        args.world_size,
        method=args.method,
        cost=cost,
        nodes=args.nodes,
        memory_slack=args.memory_slack,
        time_limit_s=args.time_limit,
    )
    named = args.matrices is None and args.model in CONFIGS
    config = CONFIGS[args.model] if named else None
    setting = Setting(
        mode=args.mode,
        sizes=Sizes(
            weight=args.weight_bytes,
            gradient=args.gradient_bytes,
            micro_batches=args.micro_batches,
            shards=args.shards,
        ),
        hardware=hardware,
        network=NetworkModel(1e-6 * args.latency_us, 1e9 * args.bandwidth_gb),
        rest=parameter_counts(config).total - sum(m.numel for m in specs) if config else 0,
        nodes=args.nodes,
        compute_s=training_flops(config, 1, args.tokens).forward
        / config.n_layers
        / (hardware.direct_use * hardware.peak_flops)
        if config and args.tokens
        else 0.0,
    )
    if args.save is not None:
        args.save.write_text(plan.to_json() + "\n")
    report = plan_report(plan, setting, cost=cost)
    return json.dumps(report, indent=2) + "\n" if args.json else plan_text(report)


def add_plan(commands: Any) -> None:
    """Add the sub-command ``plan``."""
    p = commands.add_parser(
        "plan",
        help="who would own what, and what it would cost",
        description="Decide owners for a named model (or for names and shapes of yours) and print loads, bytes, "
        "memory and modelled times. No weights are made and nothing is measured.",
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    source.add_argument("--matrices", type=Path, metavar="FILE", help="JSON object of names and shapes")
    p.add_argument("--world-size", type=int, required=True, help="data-parallel ranks")
    p.add_argument("--nodes", type=int, default=1, help="nodes, with the same number of ranks each (default: 1)")
    p.add_argument("--method", choices=get_args(Method), default="lpt", help="default: lpt")
    p.add_argument("--cost", default="device", help="flops, device (default), a800, or a JSON file of measured times")
    p.add_argument("--max-batch", type=int, default=8, help="largest batch of equal shapes (default: 8)")
    p.add_argument("--memory-slack", type=float, default=0.0, help="share by which loads may grow to even out memory")
    p.add_argument("--time-limit", type=float, default=None, metavar="S", help="of milp; then not repeatable")
    p.add_argument("--mode", choices=get_args(Mode), default="ddp", help="how bytes are counted (default: ddp)")
    p.add_argument("--shards", type=int, default=None, help="ranks in a shard group (hsdp modes)")
    p.add_argument("--micro-batches", type=int, default=1, help="forward-backward passes in a step (default: 1)")
    p.add_argument("--weight-bytes", type=int, default=2, help="of a published weight (default: 2)")
    p.add_argument("--gradient-bytes", type=int, default=4, help="of a reduced gradient (default: 4)")
    p.add_argument(
        "--tokens", type=int, default=0, help="in a rank's forward pass, to hide weights behind (default: 0)"
    )
    p.add_argument("--peak-tflops", type=float, default=312.0, help="of a rank (default: 312, an A800)")
    p.add_argument("--bandwidth-gb", type=float, default=25.0, help="of a rank's link, GB/s (default: 25)")
    p.add_argument("--latency-us", type=float, default=20.0, help="of a message, microseconds (default: 20)")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--save", type=Path, metavar="FILE", help="write the plan there, for OwnerPlan.from_json")
    p.set_defaults(run=run_plan)


COMMANDS: tuple[Add, ...] = (add_plan, add_verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; return the exit status."""
    return run_command("dist_lib.dmuon", "Plans of owner-sharded Muon.", COMMANDS, argv)
