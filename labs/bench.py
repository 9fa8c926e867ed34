"""Time ratios of ours against a baseline, measured side by side on this machine.

A lab that has something to compare defines ``ROWS``, a tuple of :class:`Row`, in ``labs/<lab>/bench.py``. Ours and the
baseline run in turn, pair by pair, so that what disturbs the machine disturbs both; the ratio is the median over the
pairs, with its quartiles. Absolute times are printed for orientation only: they belong to this machine.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dist_lib import results
from labs import framework
from labs.framework import LabError

RESULTS = Path(__file__).resolve().parents[1] / "data" / "results"


@dataclass(frozen=True)
class Pair:
    """Two things to time, and what to clean up afterwards.

    Attributes:
        ours, baseline: each does the work once and waits for the device.
        seconds: if given, each function's return value is its time in seconds (for work that times itself, such as the
            slowest of several ranks).
    """

    ours: Callable[[], Any]
    baseline: Callable[[], Any]
    seconds: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        name: short and unique within the lab.
        what: one line: what is timed, with its size.
        baseline: what it is compared with, by name.
        target: the largest ratio (our time / baseline time) that meets the target; None if it is only reported.
        make: builds the two functions, so that nothing is built for rows that do not run; may be a context manager.
        why_not: returns why the row cannot run on this machine, or an empty text.
    """

    name: str
    what: str
    baseline: str
    target: float | None
    make: Callable[[], Pair | AbstractContextManager[Pair]]
    why_not: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Measured:
    """What one row gave; times in seconds, ``ratio`` is our time over the baseline's, low and high are quartiles."""

    lab: str
    name: str
    what: str
    baseline: str
    target: float | None
    pairs: int = 0
    ours_s: float = 0.0
    baseline_s: float = 0.0
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    skipped: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or without a measurement."""
        return None if self.skipped or self.target is None else self.ratio <= self.target


def find_rows(lab: str | None = None) -> list[tuple[str, Row]]:
    """Rows of one lab or of all, as ``(lab, row)``.

    Raises:
        LabError: an unknown lab, a lab without rows, or two rows of one name.
    """
    names = framework.lab_names()
    if lab is not None and lab not in names:
        raise LabError(f"there is no lab {lab!r}; there are {', '.join(names)}")
    rows: list[tuple[str, Row]] = []
    for name in [lab] if lab else names:
        if (framework.ROOT / name / "bench.py").exists():
            rows += [(name, row) for row in importlib.import_module(f"labs.{name}.bench").ROWS]
    if lab is not None and not rows:
        raise LabError(f"lab {lab!r} has nothing to time (no labs/{lab}/bench.py)")
    seen = [(name, row.name) for name, row in rows]
    twice = sorted({f"{a}/{b}" for a, b in seen if seen.count((a, b)) > 1})
    if twice:
        raise LabError(f"rows that stand twice: {', '.join(twice)}")
    return rows


def _seconds(function: Callable[[], Any], given: bool) -> float:
    begin = time.perf_counter()
    value = function()
    elapsed = time.perf_counter() - begin
    return float(value) if given else elapsed


def measure(lab: str, row: Row, pairs: int) -> Measured:
    """Time one row: one warm-up of each, then ``pairs`` pairs that alternate in order."""
    empty = Measured(lab, row.name, row.what, row.baseline, row.target)
    reason = row.why_not()
    if reason:
        return Measured(**{**asdict(empty), "skipped": reason})
    made = row.make()
    ours, theirs = [], []
    with nullcontext(made) if isinstance(made, Pair) else made as pair:
        _seconds(pair.ours, pair.seconds)
        _seconds(pair.baseline, pair.seconds)
        for index in range(pairs):
            if index % 2:
                theirs.append(_seconds(pair.baseline, pair.seconds))
                ours.append(_seconds(pair.ours, pair.seconds))
            else:
                ours.append(_seconds(pair.ours, pair.seconds))
                theirs.append(_seconds(pair.baseline, pair.seconds))
    low, ratio, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    times = {"ours_s": statistics.median(ours), "baseline_s": statistics.median(theirs)}
    found = {"pairs": pairs, **times, "ratio": ratio, "ratio_low": low, "ratio_high": high}
    return Measured(**{**asdict(empty), **found})


def hardware_name(hardware: dict[str, Any]) -> str:
    """A file name for this kind of machine: its GPU, or its processor and number of cores."""
    gpus = hardware.get("gpus") or []
    name = f"{len(gpus)}x {gpus[0]}" if gpus else f"{hardware['cpu']} {hardware['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def save(measured: list[Measured], directory: Path | None = None) -> Path:
    """Merge the measured rows into ``bench-<hardware>.json``; rows of other labs in it stay."""
    hardware = results.hardware()
    path = (directory or RESULTS) / f"bench-{hardware_name(hardware)}.json"
    try:
        old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    except (ValueError, KeyError) as error:
        raise LabError(f"{path} cannot be read: {error!r}; move it away and run again") from error
    rows = old | {f"{m.lab}/{m.name}": {**asdict(m), "met": m.met} for m in measured if not m.skipped}
    data = {"hardware": hardware, "versions": results.versions(), "rows": rows}
    results.write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")
    return path


def _cells(row: Measured) -> list[str]:
    if row.skipped:
        return [row.lab, f"{row.what}\n{row.skipped}", "", "", "", "", "not run"]
    target = "" if row.target is None else f"<= {row.target:g}"
    verdict = {True: "met", False: "missed", None: ""}[row.met]
    spread = f"{row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
    times = [f"{row.ours_s * 1e3:.4g}", f"{row.baseline_s * 1e3:.4g}"]
    return [row.lab, f"{row.what}\nagainst {row.baseline}", *times, spread, target, verdict]


def run_rows(console: Console, lab: str | None, pairs: int, save_results: bool) -> bool:
    """Measure and print every row; returns whether no target was missed.

    Raises:
        LabError: see :func:`find_rows`.
    """
    rows = find_rows(lab)
    if not rows:
        console.print("No lab has anything to time yet.")
        return True
    table = Table(title="Ours against the baseline, in turn")
    for column in ("lab", "what", "ours (ms)", "baseline (ms)", "ratio (quartiles)", "target", ""):
        table.add_column(column, justify="right" if "(ms)" in column else "left")
    measured = []
    for name, row in rows:
        with console.status(f"{name}: {row.name}"):
            measured.append(measure(name, row, pairs))
        table.add_row(*_cells(measured[-1]))
    console.print(table)
    if save_results:
        console.print(f"results: {save(measured)}", soft_wrap=True)
    return all(row.met is not False for row in measured)
