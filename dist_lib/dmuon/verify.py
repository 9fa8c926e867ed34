"""A self-check on the caller's own model: a few steps on a few processes, compared with one process in every bit.

It answers before a long run: is the model supported; do owners compute what one process would; is every matrix updated
once; do all ranks agree; are the bytes those of the formulas; does the choice of owners matter; does a checkpoint
continue as if nothing had happened.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_lib.comm import CommCounter, ExactReducer, LaunchError, collectives, launch
from dist_lib.dmuon.bytes import Mode, Sizes, step_payload
from dist_lib.dmuon.checkpoint import load_checkpoint, model_state_dict, save_checkpoint
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.dmuon.fsdp import DMuonFSDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.dmuon.plan import OwnerPlan, make_plan
from dist_lib.dmuon.runtime import Runtime
from dist_lib.models import CONFIGS, Decoder, get_config
from dist_lib.optim import MuonWithAdamW, split_parameters

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int, int], Tensor]
VerifyMode = Literal["ddp", "fsdp-keep", "fsdp-free"]
MODES: tuple[VerifyMode, ...] = ("ddp", "fsdp-keep", "fsdp-free")


@dataclass(frozen=True)
class VerifyCheck:
    """One outcome: ``name``, whether it is ``good``, and what was found."""

    name: str
    good: bool
    found: str


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify_model` found, one entry a check."""

    checks: tuple[VerifyCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every check is good."""
        return all(c.good for c in self.checks)

    def text(self) -> str:
        """One line a check."""
        wide = max((len(c.name) for c in self.checks), default=0)
        return "".join(f"{'ok  ' if c.good else 'FAIL'}  {c.name:<{wide}}  {c.found}\n" for c in self.checks)


@dataclass(frozen=True)
class _Case:
    build: Build
    loss: Loss
    steps: int
    mode: VerifyMode
    folder: str
    tolerance: float

    def runtime(self, plan: OwnerPlan, *, ordered: bool) -> tuple[Runtime, DMuon]:
        model, reducer = self.build(), ExactReducer(ordered=ordered)
        runtime: Runtime
        if self.mode == "ddp":
            runtime = DMuonDDP(model, plan, reducer=reducer)
        else:
            runtime = DMuonFSDP(model, plan, reducer=reducer, reshard_after_forward=self.mode == "fsdp-free")
        return runtime, DMuon(runtime, lr=1e-2)

    def train(self, runtime: Runtime, optimizer: DMuon, first: int, last: int) -> None:
        for step in range(first, last):
            self.loss(runtime.model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()


def _one_process(case: _Case) -> dict[str, Tensor]:
    """Weights after the same steps with everything on every rank and gradients added in rank order."""
    model = case.build()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel():
            collectives.broadcast(tensor.detach(), 0)
    optimizer = MuonWithAdamW(split_parameters(model), lr=1e-2)
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(case.steps):
        case.loss(model, step, dist.get_rank()).backward()
        flags = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
        used = collectives.all_reduce(flags, op="max").tolist()
        for p, flag in zip(trained, used, strict=True):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = collectives.ordered_sum(gradient).div_(dist.get_world_size()) if flag else None
        optimizer.step()
        model.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _largest(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    worst = (0.0, "")
    for name, value in reference.items():
        if not torch.equal(ours[name], value):
            size = float(value.float().norm()) or 1.0
            worst = max(worst, (float((ours[name].float() - value.float()).norm()) / size, name))
    return worst


def _weights(case: _Case, reference: dict[str, Tensor], runtime: Runtime, name: str) -> list[VerifyCheck]:
    ours = model_state_dict(runtime)
    error, worst = _largest(ours, reference)
    unequal = []
    for key in reference:
        rows = collectives.all_gather(ours[key])
        if not all(torch.equal(rows[0], r) for r in rows):
            unequal.append(key)
    found = "bit for bit" if error == 0 else f"largest relative difference {error:.1e} in {worst}"
    same = VerifyCheck("all ranks hold the same bits", not unequal, ", ".join(unequal[:3]) or "every parameter")
    return [VerifyCheck(name, error <= case.tolerance, found), same]


def _verify_rank(case: _Case) -> tuple[VerifyCheck, ...]:
    rank, world = dist.get_rank(), dist.get_world_size()
    matrices = split_parameters(case.build()).muon
    plan = make_plan(matrices, world)
    reference = _one_process(case)
    runtime, optimizer = case.runtime(plan, ordered=True)
    case.train(runtime, optimizer, 0, case.steps)
    checks = _weights(case, reference, runtime, "weights as on one process")
    histogram = optimizer.total_histogram()
    idle = [n for n, k in histogram.items() if k == 0]
    wrong = {n: k for n, k in histogram.items() if k not in (0, case.steps)}
    found = f"{len(histogram) - len(idle)} matrices x {case.steps} steps" + (f", unused: {len(idle)}" if idle else "")
    checks.append(VerifyCheck("every matrix orthogonalised once a step", not wrong, str(wrong) if wrong else found))
    rng = random.Random(0)
    other = make_plan(matrices, world, owners={n: rng.randrange(world) for n, _ in matrices})
    moved, second = case.runtime(other, ordered=True)
    case.train(moved, second, 0, case.steps)
    checks += _weights(case, reference, moved, "weights with random owners")[:1]
    checks.append(_checkpoint(case, plan, other, model_state_dict(runtime)))
    checks.append(_bytes(case, plan, rank))
    return tuple(checks)


def _checkpoint(case: _Case, plan: OwnerPlan, other: OwnerPlan, expected: dict[str, Tensor]) -> VerifyCheck:
    """Save one step before the end with one owner map, go on with another."""
    runtime, optimizer = case.runtime(plan, ordered=True)
    case.train(runtime, optimizer, 0, case.steps - 1)
    save_checkpoint(case.folder, runtime, optimizer, step=case.steps - 1)
    runtime, optimizer = case.runtime(other, ordered=True)
    load_checkpoint(case.folder, runtime, optimizer)
    case.train(runtime, optimizer, case.steps - 1, case.steps)
    error, worst = _largest(model_state_dict(runtime), expected)
    found = "next step bit for bit" if error == 0 else f"differs by {error:.1e} in {worst}"
    return VerifyCheck("a checkpoint continues with other owners", error == 0, found)


def _bytes(case: _Case, plan: OwnerPlan, rank: int) -> VerifyCheck:
    runtime, optimizer = case.runtime(plan, ordered=False)
    case.train(runtime, optimizer, 0, 1)
    with CommCounter() as counter:
        case.train(runtime, optimizer, 1, 2)
        runtime.drain()
    shown = {p.dtype for p in runtime.matrices.values()}
    mode: Mode = case.mode
    weight = next(iter(shown)).itemsize if len(shown) == 1 else 4
    expected = step_payload(mode, plan, Sizes(weight=weight))[rank]
    found = {op: counter.bytes(op) for op in expected}
    said = (
        f"{found}" if found == expected else f"{found}, formula: {expected} (tied or reused layers are fetched again)"
    )
    return VerifyCheck("bytes of the formulas", found == expected or len(shown) > 1, said)


def verify_model(
    build: Build,
    loss: Loss,
    *,
    world_size: int = 2,
    steps: int = 3,
    mode: VerifyMode = "ddp",
    tolerance: float = 0.0,
    timeout_s: float = 120.0,
) -> VerifyReport:
    """Check owner-sharded Muon on a model of the caller's on some processes of this machine's CPU.

    Args:
        build: returns the model; an importable function without arguments.
        loss: of the model for a step and a rank; importable, and the same at every call.
        world_size: processes.
        steps: at least 2.
        mode: ``"ddp"``, ``"fsdp-keep"`` or ``"fsdp-free"``.
        tolerance: relative difference of a weight from one process that still passes. 0 means every bit; FSDP2 adds
            gradients of a module that is used twice in another order, and on more than 2 ranks its own parameters too.
        timeout_s: for all of it.

    Raises:
        ValueError: fewer than 2 steps or another mode.
        RankError: a rank failed; the message holds its traceback.
    """
    if steps < 2 or mode not in MODES:
        raise ValueError(f"steps = {steps}, mode = {mode!r}: need at least 2 steps and one of {', '.join(MODES)}")
    with tempfile.TemporaryDirectory(prefix="dmuon_verify_") as folder:
        case = _Case(build, loss, steps, mode, folder, tolerance)
        outcomes = launch(_verify_rank, world_size=world_size, args=(case,), timeout_s=timeout_s)
    checks = []
    for position in range(len(outcomes[0])):
        here = [outcome[position] for outcome in outcomes]
        checks.append(next((c for c in here if not c.good), here[0]))
    return VerifyReport(tuple(checks))


@dataclass(frozen=True)
class DecoderCase:
    """Builds a named decoder, and random text for it."""

    name: str

    def build(self) -> nn.Module:
        """The model, with weights of seed 0."""
        return Decoder(get_config(self.name), seed=0)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """Loss on one sequence of 16 random tokens of this step and rank."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(0, get_config(self.name).vocab_size, (1, 17), generator=generator)
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def run_verify(args: argparse.Namespace) -> str:
    """Run the checks of the sub-command and return the report.

    Raises:
        ValueError: a check failed, or a factory that cannot be found.
    """
    build, loss = _found(args.factory) if args.factory else _decoder(args.model)
    try:
        report = verify_model(
            build,
            loss,
            world_size=args.world_size,
            steps=args.steps,
            mode=args.mode,
            tolerance=args.tolerance,
            timeout_s=args.timeout,
        )
    except LaunchError as error:
        raise ValueError(f"the self-check could not be run: {error}") from error
    if not report.ok:
        raise ValueError(f"the self-check failed\n{report.text()}")
    return report.text()


def _decoder(name: str) -> tuple[Build, Loss]:
    case = DecoderCase(name)
    return case.build, case.loss


def _found(spec: str) -> tuple[Build, Loss]:
    module, _, names = spec.partition(":")
    build, _, loss = names.partition(",")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
        return getattr(found, build), getattr(found, loss)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--factory {spec}: {error}; give module:build,loss, both functions of the module") from error


def add_verify(commands: Any) -> None:
    """Add the sub-command ``verify``."""
    p = commands.add_parser(
        "verify",
        help="check owner-sharded Muon on a model, on some processes of this machine",
        description="Train a few steps on a few CPU processes and compare with one process, bit for bit.",
    )
    source = p.add_mutually_exclusive_group()
    source.add_argument("--model", choices=sorted(CONFIGS), default="tiny-0.3m", metavar="NAME", help="tiny-0.3m")
    source.add_argument(
        "--factory", metavar="MODULE:BUILD,LOSS", help="build() returns the model, loss(model, step, rank) its loss"
    )
    p.add_argument("--world-size", type=int, default=2, help="processes (default: 2)")
    p.add_argument("--steps", type=int, default=3, help="at least 2 (default: 3)")
    p.add_argument("--mode", choices=MODES, default="ddp", help="default: ddp")
    p.add_argument("--tolerance", type=float, default=0.0, help="relative, of a weight (default: 0, every bit)")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds for all of it (default: 120)")
    p.set_defaults(run=run_verify)
