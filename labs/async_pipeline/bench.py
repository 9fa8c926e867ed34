"""Time a batch of the pipeline that never drains against synchronous 1F1B, on two balanced stages."""

from __future__ import annotations

import os

from dist_lib.comm import launch
from labs.async_pipeline.timing import Work, measure, run_torch
from labs.bench import Pair, Row

SHARE = 0.95  # of the speed-up without any bubble


def _two_cores() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return "" if cores >= 2 else f"two stages need two cores, this process may use {cores}"


def _work(micro_batches: int) -> Work:
    return Work(stages=2, micro_batches=micro_batches, batches=8)


def _against_synchronous(micro_batches: int) -> Pair:
    """Seconds a batch in the middle of a run, fill and drain left out."""
    work = _work(micro_batches)
    return Pair(lambda: measure(work, 1).period_s, lambda: measure(work, 0).period_s, seconds=True)


def _against_torch(micro_batches: int) -> Pair:
    work = _work(micro_batches)
    return Pair(
        lambda: measure(work, 0).period_s,
        lambda: max(launch(run_torch, world_size=2, args=(work,), timeout_s=120)),
        seconds=True,
    )


ROWS = (
    Row(
        name="never-drained-m2",
        what="batch of 2 micro-batches, 2 balanced stages, delay of one update, fill and drain excluded",
        baseline="synchronous 1F1B of the same runtime",
        target=1 / (SHARE * 1.5),
        make=lambda: _against_synchronous(2),
        why_not=_two_cores,
    ),
    Row(
        name="never-drained-m4",
        what="the same with 4 micro-batches",
        baseline="synchronous 1F1B of the same runtime",
        target=1 / (SHARE * 1.25),
        make=lambda: _against_synchronous(4),
        why_not=_two_cores,
    ),
    Row(
        name="synchronous-m4",
        what="the same stages without delay, 4 micro-batches: is the baseline itself a good one?",
        baseline="Schedule1F1B of torch.distributed.pipelining",
        target=None,
        make=lambda: _against_torch(4),
        why_not=_two_cores,
    ),
)
