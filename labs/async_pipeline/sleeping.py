"""Sleeping stages against the formulas, and multiplying ones beside them: ``python -m labs.async_pipeline.sleeping``.

A stage that sleeps needs no core, so that four of them can be timed on two cores. Flushed 1F1B takes (m + p - 1)
(tF + tB) a batch and is idle for (p - 1) / (m + p - 1) of it; the schedule that never drains takes m (tF + tB), and is
idle for (p - 1) / (K m + p - 1) of a run of K batches; the norm of a batch's gradient is known m - p + 1 forwards and
backwards before it is needed. The record says how far a real run is from that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dist_lib import results
from labs.async_pipeline.timing import Work, measure, middle

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "async-sleeping-stages.json"
SIZES = ((2, 2), (4, 4), (4, 8))
FORWARD_S, BACKWARD_S, BATCHES = 0.02, 0.04, 6


def formula(work: Work, delay: int) -> dict[str, float]:
    """Seconds a batch and idle share of balanced stages, messages hidden."""
    m, ahead, pair = work.micro_batches, work.stages - 1, work.forward_s + work.backward_s
    if delay == 0:
        return {"period_s": (m + ahead) * pair, "idle": ahead / (m + ahead)}
    return {"period_s": m * pair, "idle": ahead / (work.batches * m + ahead), "slack_periods": m - ahead}


def sleeping(repeats: int) -> list[dict[str, Any]]:
    """One row for each size and schedule."""
    rows = []
    for p, m in SIZES:
        work = Work(stages=p, micro_batches=m, batches=BATCHES, forward_s=FORWARD_S, backward_s=BACKWARD_S)
        for delay in (0, 1):
            found = middle([measure(work, delay) for _ in range(repeats)])
            ideal = formula(work, delay)
            rows.append({"stages": p, "micro_batches": m, "delay": delay, "measured": found, "formula": ideal})
    return rows


def multiplying(repeats: int) -> list[dict[str, Any]]:
    """Two stages on two cores: the speed-up by the period, and how near the period is to the time of computing."""
    rows = []
    for m in (2, 4):
        work = Work(stages=2, micro_batches=m, batches=8)
        flushed, delayed = [], []
        for _ in range(repeats):
            flushed.append(measure(work, 0))
            delayed.append(measure(work, 1))
        synchronous, ours = middle(flushed), middle(delayed)
        rows.append(
            {
                "stages": 2,
                "micro_batches": m,
                "synchronous": synchronous,
                "delayed": ours,
                "speed_up": synchronous["period_s"] / ours["period_s"],
                "ideal_speed_up": (m + 1) / m,
                "busy_over_period": ours["busy_per_batch_s"] / ours["period_s"],
            }
        )
    return rows


def main(
    out: Annotated[Path, typer.Option(help="file to write")] = RECORD,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each row; the median counts")] = 5,
) -> None:
    """Time sleeping and multiplying stages on this machine, and write the record."""
    console = Console()
    record: dict[str, Any] = {"repeats": repeats, "forward_s": FORWARD_S, "backward_s": BACKWARD_S, "batches": BATCHES}
    record["sleeping"] = sleeping(repeats)
    for row in record["sleeping"]:
        found, ideal = row["measured"], row["formula"]
        console.print(
            f"p={row['stages']} m={row['micro_batches']} delay={row['delay']}: "
            f"{found['period_s'] * 1e3:.0f} ms a batch (formula {ideal['period_s'] * 1e3:.0f}), "
            f"idle {found['idle']:.3f} (formula {ideal['idle']:.3f})"
            + (
                f", slack {found['slack_periods']:.2f} periods (formula {ideal['slack_periods']})"
                if row["delay"]
                else ""
            )
        )
    record["multiplying"] = multiplying(repeats)
    for row in record["multiplying"]:
        console.print(
            f"p=2 m={row['micro_batches']}, multiplying: {row['speed_up']:.3f} times the synchronous pipeline "
            f"(ideal {row['ideal_speed_up']:.2f}); computing for {row['busy_over_period']:.3f} of the period; "
            f"forward {row['delayed']['forward_s'] * 1e3:.1f} ms, imbalance {row['delayed']['imbalance']:.3f}"
        )
    if sys.platform == "linux":
        record["real_time_priority"] = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    record |= {"hardware": results.hardware(), "versions": results.versions()}
    results.write_text(out, json.dumps(record, indent=1, sort_keys=True) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
