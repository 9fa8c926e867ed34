"""What reinforcement learning changes in a small model: ``python -m labs.pulse.rl --study``.

A decoder of 0.6 million parameters learns to add two numbers of two digits: first from right answers, to about half of
exact matches, then 40 steps of GRPO from rewards, in both ways to store parameters, at three learning rates, with AdamW
and with Muon. After each step the bfloat16 cast that acts is compared bit by bit with those before. The record is
written after each run, and a study that was stopped goes on where it was. One toy and one seed, unless more are asked
for: it shows how the two regimes differ, not how sparse a large model's updates are.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dist_lib import results
from dist_lib.models import Decoder
from dist_lib.pulse import SparsityRecorder
from dist_lib.pulse.sparsity_measures import crossing_model
from dist_lib.tasks import Addition, GrpoConfig, GrpoTrainer, accuracy, sample_rollouts, warm_start

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "pulse-rl.json"
TASK = Addition(2)
WARM_STEPS, STEPS, WARMUP, LAST, KS = 280, 40, 5, 10, (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """One run of the study."""

    optimizer: str
    storage: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Key in the record, such as ``adamw-fp32-1e-06-0``."""
        return f"{self.optimizer}-{self.storage}-{self.lr:g}-{self.seed}"


def cases(seeds: int = 1) -> list[Case]:
    """The runs of the study, seed by seed."""
    plan = {"adamw": (1e-6, 3e-6, 1e-5), "muon": (1e-6, 3e-6)}
    return [
        Case(optimizer, storage, lr, seed)
        for seed in range(seeds)
        for optimizer, rates in plan.items()
        for storage in ("bf16", "fp32")
        for lr in rates
    ]


def warm_model(seed: int, steps: int = WARM_STEPS) -> Decoder:
    """The model from which all runs of a seed start."""
    model = Decoder(TASK.model_config(), seed=seed)
    warm_start(model, TASK, steps=steps, seed=seed)
    return model


def _flat(model: Decoder) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _nonzero(model: Decoder) -> float:
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float((gradients != 0).double().mean())


def run_case(case: Case, start: Decoder, *, steps: int = STEPS, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train from ``start`` and measure.

    Args:
        case: which run.
        start: the model, not changed.
        steps: of GRPO, more than the distances of ``KS`` that are to be measured.
        config: other settings of :class:`~dist_lib.tasks.GrpoConfig`.

    Returns:
        S_k over the last steps in percent, sizes of updates and gradients, rewards and accuracies.
    """
    settings = GrpoConfig(
        lr=case.lr,
        storage=case.storage,
        optimizer=case.optimizer,
        seed=case.seed,
        warmup_steps=WARMUP,
        **(config or {}),
    )
    trainer = GrpoTrainer(start, TASK, settings)
    recorder = SparsityRecorder(KS)
    recorder.record(trainer.weights())
    taken, predicted, dense = [], [], []
    for step in range(steps):
        batch = sample_rollouts(trainer.acting, TASK, settings, step=step, version=step)
        before = _flat(trainer.model)
        taken.append(trainer.step(batch))
        recorder.record(trainer.weights())
        dense.append(_nonzero(trainer.acting))
        if case.storage == "fp32":
            predicted.append(100 * crossing_model(_flat(trainer.model) - before, before))
    return {
        **asdict(case),
        "sparsity": {str(k): 100 * statistics.fmean(recorder.history[k][-LAST:]) for k in KS if recorder.history[k]},
        "lowest": 100 * min(recorder.history[1]),
        "by_step": [100 * s for s in recorder.history[1]],
        "crossing_model": statistics.fmean(predicted[-LAST:]) if predicted else None,
        "moved": statistics.fmean(s.moved for s in taken[-LAST:]),
        "gradient_density": 100 * statistics.fmean(dense[-LAST:]),
        "rewards": [s.reward for s in taken],
        "accuracy_before": accuracy(start, TASK),
        "accuracy_after": accuracy(trainer.acting, TASK),
    }


def study(out: Path, tell: Callable[[str], None], seeds: int = 1) -> dict[str, Any]:
    """Run what is missing in the record and write it after each run."""
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": {}}
    starts: dict[int, Decoder] = {}
    for case in cases(seeds):
        if case.name in record["runs"]:
            continue
        begin = time.monotonic()
        if case.seed not in starts:
            starts[case.seed] = warm_model(case.seed)
        found = run_case(case, starts[case.seed])
        record["runs"][case.name] = {**found, "seconds": round(time.monotonic() - begin, 1)}
        record["settings"] = {"warm_steps": WARM_STEPS, "steps": STEPS, "warmup": WARMUP, "last": LAST}
        record["parameters"] = sum(p.numel() for p in starts[case.seed].parameters())
        record["hardware"], record["versions"] = results.hardware(), results.versions()
        results.write_text(out, json.dumps(record, indent=1) + "\n")
        shown = "  ".join(f"S{k} {v:.2f}" for k, v in found["sparsity"].items())
        tell(f"{case.name}: {shown}  accuracy {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}")
    return record


def rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of the study: means over seeds, one row for each optimizer, storage and learning rate."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for run in record["runs"].values():
        groups.setdefault((run["optimizer"], run["storage"], run["lr"]), []).append(run)
    table = []
    for (optimizer, storage, lr), runs in sorted(groups.items()):
        row: dict[str, Any] = {"optimizer": optimizer, "storage": storage, "lr": lr, "seeds": len(runs)}
        for k in KS:
            row[f"S{k}"] = statistics.fmean(run["sparsity"][str(k)] for run in runs)
        for name in ("moved", "gradient_density", "accuracy_before", "accuracy_after"):
            row[name] = statistics.fmean(run[name] for run in runs)
        row["crossing_model"] = statistics.fmean(r["crossing_model"] for r in runs) if storage == "fp32" else None
        table.append(row)
    return table


def main(
    start: Annotated[
        bool, typer.Option("--study", help="run what the record lacks; without it the table is shown")
    ] = False,
    out: Annotated[Path, typer.Option(help="record")] = RECORD,
    seeds: Annotated[int, typer.Option(help="how many, from 0")] = 1,
) -> None:
    """Run the study, or show its table."""
    torch.set_num_threads(1)
    console = Console(width=150)
    if not start and not out.exists():
        raise typer.BadParameter(f"{out} does not exist; run with --study")
    record = (
        study(out, lambda line: console.print(line, soft_wrap=True), seeds) if start else json.loads(out.read_text())
    )
    found = rows(record)
    table = Table(*found[0])
    for row in found:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
