"""Time the 8-bit all-reduce against wider ones between two hosts that a cable of 1 Gbit/s joins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from labs.agoq.shaped import Work, measure
from labs.bench import Pair, Row
from labs.shaped_link import shaped_link, why_not

WORK = Work()


@contextmanager
def against(ours: str, baseline: str, work: Work = WORK) -> Iterator[Pair]:
    """Two kinds of all-reduce over one link."""
    with shaped_link(work.ranks, megabits_per_s=work.megabits_per_s) as link:
        yield Pair(
            lambda: measure(ours, link, work).seconds, lambda: measure(baseline, link, work).seconds, seconds=True
        )


def _row(name: str, ours: str, baseline: str, target: float | None) -> Row:
    what = f"{ours} all-reduce of {WORK.numel / 2**20:g} Mi numbers, 2 gloo ranks of one thread, 1 Gbit/s each way"
    return Row(
        name=name,
        what=what,
        baseline=f"{baseline} all-reduce",
        target=target,
        make=lambda: against(ours, baseline),
        why_not=why_not,
    )


ROWS = (
    _row("all-reduce", "int8", "float32", 0.35),
    _row("all-reduce-dynamic8", "dynamic8", "float32", None),
    _row("all-reduce-bfloat16", "bfloat16", "float32", None),
    _row("all-reduce-against-bfloat16", "int8", "bfloat16", None),
)
