"""Sweep the learning rates of both optimizers once, and record them: ``python -m labs.muon.sweep``.

The settings are those of the ``toy`` scale; the seeds are not those that its comparison reports, so that the choice of
a learning rate and the measurement of its result do not share their luck. The best of each goes into the lab's TOML
files; a test compares them with the record.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dist_lib import results
from dist_lib.comm import distributed
from labs.framework import RunContext, load_scale
from labs.muon.run import LAB, NAMES, Config, train_once

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "muon-lr-sweep.json"
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
SEEDS = (100, 101)


def sweep(
    config: Config,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = SEEDS,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Validation losses ``{optimizer: {rate: [one a seed]}}`` and the best rate of each, by the mean over seeds."""
    losses: dict[str, dict[str, list[float]]] = {name: {} for name in NAMES}
    with distributed(device="auto") as dist, tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            for rate in rates:
                changes: dict[str, Any] = {"save_every": 0, f"{name}_lr": rate}
                changed = dataclasses.replace(config, **changes)
                found = [train_once(name, s, changed, RunContext(dist, s, Path(folder))).validation for s in seeds]
                losses[name][f"{rate:g}"] = found
                tell(f"{name}  lr {rate:g}  validation loss {statistics.fmean(found):.4f}")
    best = {name: min(by_rate, key=lambda r: statistics.fmean(by_rate[r])) for name, by_rate in losses.items()}
    return {
        "config": dataclasses.asdict(config),
        "seeds": list(seeds),
        "validation_loss": losses,
        "best": {name: float(rate) for name, rate in best.items()},
        "hardware": results.hardware(),
        "versions": results.versions(),
    }


def main(
    out: Annotated[Path, typer.Option(help="file to write")] = RECORD,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value of the toy scale")] = None,
) -> None:
    """Train every rate of both optimizers at the toy scale and write the record."""
    torch.set_num_threads(1)
    console = Console()
    config, _ = load_scale(LAB, "toy", settings or [])
    found = sweep(config, tell=console.print)
    results.write_text(out, json.dumps(found, indent=1) + "\n")
    console.print(f"best: {found['best']}; written to {out}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
