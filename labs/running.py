"""Runs a lab: in this process, on several processes of this machine, or as one rank of ``torchrun``.

All three call the same function on every rank and end with the same record.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_lib import results
from dist_lib.comm import DistContext, distributed, launch
from labs.framework import Lab, LabError, RunContext, RunSettings

MARK = "@step "


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run: plain data that reaches every rank."""

    lab: str
    module: str
    scale: str
    config: Any
    seed: int
    directory: str
    resumed: bool


def run_directory(lab: str, scale: str, root: Path) -> Path:
    """A fresh folder for a run: ``<root>/<lab>/<date>-<time>-<scale>``."""
    base = root / lab / f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(scale).stem}"
    path, count = base, 1
    while path.exists():
        path, count = base.with_name(f"{base.name}-{count}"), count + 1
    return path


def find_run(lab: str, given: str, root: Path) -> Path:
    """The folder of an earlier run: a path, or ``latest``.

    Raises:
        LabError: no such run.
    """
    if given == "latest":
        runs = sorted((p.parent for p in (root / lab).glob("*/request.json")), key=lambda p: p.stat().st_mtime)
        if not runs:
            raise LabError(f"lab {lab!r} has no run under {root} yet")
        return runs[-1]
    path = Path(given)
    if not (path / "request.json").exists():
        raise LabError(f"{given} is not the folder of a run (it has no request.json); use 'latest' or a path")
    return path


def _on_rank(request: Request, on_step: Callable[[dict[str, Any]], None] | None, ctx: DistContext) -> dict[str, Any]:
    lab: Lab = importlib.import_module(request.module).LAB
    torch.manual_seed(request.seed)
    if ctx.device.type == "cpu":
        torch.set_num_threads(1)  # the same bits everywhere, as launched ranks have it; faster for small models, too
    context = RunContext(ctx, request.seed, Path(request.directory), request.resumed, on_step)
    with context.timed("total"):
        metrics = lab.run(request.config, context)
    return {
        "metrics": metrics,
        "history": context.history,
        "timings": context.timings,
        "peak_memory_bytes": results.peak_memory_bytes(),
        "device": str(ctx.device),
        "world_size": ctx.world_size,
    }


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same numbers with None for NaN and infinity, which JSON has not: a diverged run is recorded as such."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _print_step(row: dict[str, Any]) -> None:
    print(MARK + json.dumps(row), flush=True)


def _launched(request: Request, device: str) -> dict[str, Any]:
    with distributed(device=device) as ctx:
        return _on_rank(request, _print_step, ctx)


def execute(
    request: Request,
    settings: RunSettings,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_line: Callable[[int, str], None] | None = None,
) -> results.RunRecord:
    """Run and write the record; also when the run fails or is interrupted, then with that status.

    Args:
        request: what to run.
        settings: world size, device, timeout.
        on_step: receives each step that rank 0 logs.
        on_line: receives every other line that a rank of several prints.
    """
    directory = Path(request.directory)
    record = results.RunRecord(
        lab=request.lab,
        scale=request.scale,
        seed=request.seed,
        config=dataclasses.asdict(request.config),
        world_size=settings.world_size,
        device=settings.device,
        versions=results.versions(),
        hardware=results.hardware(),
        commit=results.commit(),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        status="failed",
    )

    def line(rank: int, text: str) -> None:
        if rank == 0 and text.startswith(MARK):
            row = json.loads(text[len(MARK) :])
            record.history.append({k: v for k, v in row.items() if k != "total"})
            if on_step is not None:
                on_step(row)
        elif on_line is not None:
            on_line(rank, text)

    try:
        if "RANK" in os.environ or settings.world_size == 1:
            with distributed(device=settings.device) as ctx:
                outcome = _on_rank(request, on_step if ctx.is_main else None, ctx)
                if not ctx.is_main:
                    return record
        else:
            outcome = launch(
                _launched,
                world_size=settings.world_size,
                args=(request, settings.device),
                timeout_s=settings.timeout_minutes * 60,
                group_timeout_s=30.0,
                device=settings.device,
                on_output=line,
            )[0]
        record = dataclasses.replace(record, status="finished", **outcome)
    except KeyboardInterrupt:
        record.status = "interrupted"
        raise
    finally:
        if os.environ.get("RANK", "0") == "0":
            record.metrics = finite(record.metrics)
            record.history = [finite(row) for row in record.history]
            results.save(record, directory)
    return record


def write_request(request: Request, settings: RunSettings) -> None:
    """Write what was asked for beside the run, for ``--resume``."""
    data = {**dataclasses.asdict(request), "settings": dataclasses.asdict(settings)}
    results.write_text(Path(request.directory) / "request.json", json.dumps(data, indent=1) + "\n")


def read_request(directory: Path, lab: Lab) -> tuple[Request, RunSettings]:
    """Read it again, to resume with the same configuration and seed.

    Raises:
        LabError: a damaged file, or settings that the lab no longer has.
    """
    path = directory / "request.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        settings = RunSettings(**data.pop("settings"))
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in data["config"].items()}
        data.update(config=lab.config(**plain), directory=str(directory), resumed=True)
        return Request(**data), settings
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path} cannot be read: {error}; start the run anew without --resume") from error
