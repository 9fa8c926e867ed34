"""Checks and times the GPU code on a machine that has a GPU, with torch, Triton and numpy alone.

``python -m labs gpu-check`` measures the machine's own ceilings first (memory copy, bfloat16 matmul), then runs every
module of :data:`CHECK_MODULES`. A module has one function ``run(report)`` and a process of its own; one that fails,
hangs or breaks its CUDA context is reported and the others go on. This file imports neither Typer nor Rich nor plotly,
nor anything of this project that does. On a machine without CUDA there is nothing to do, which is no failure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Each name is a module with `run(report: GpuReport) -> None`; it needs torch, triton and numpy at most.
CHECK_MODULES: tuple[str, ...] = (
    "labs.gpu.newton_schulz",
    "labs.gpu.dmuon",
    "labs.gpu.async_pipeline",
    "labs.gpu.quantization",
    "labs.gpu.coded_products",
    "labs.gpu.quantized_training",
    "labs.gpu.weight_sync",
)
CEILINGS = "ceilings"
BUDGET_S = 480.0
COPY_BYTES = 2 * 10**9
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Timing:
    """Times of one thing, in seconds: the median and the quartiles of ``samples`` calls."""

    median_s: float
    low_s: float
    high_s: float
    samples: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles relative to the median."""
        return (self.high_s - self.low_s) / self.median_s


@dataclass(frozen=True)
class Entry:
    """One line of the report: ``ok`` is None for a measurement without a limit."""

    module: str
    name: str
    text: str
    ok: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)


def summarise(times: Sequence[float]) -> Timing:
    """Median and quartiles of at least three times."""
    if len(times) < 3:
        raise ValueError(f"{len(times)} times given; at least 3 are needed for a median and a spread")
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median, low, high, len(times))


class GpuReport:
    """Collects what the checks find, prints each line as it comes, and knows how much time is left.

    Args:
        budget_s: for all modules together.
        say: receives each line; default: standard output.
    """

    def __init__(self, *, budget_s: float = BUDGET_S, say: Callable[[str], None] | None = None) -> None:
        self.entries: list[Entry] = []
        self.ceilings: dict[str, float] = {}
        self.module = ""
        self._say = say or (lambda line: print(line, flush=True))
        self._deadline = time.monotonic() + budget_s

    @property
    def failed(self) -> bool:
        """Whether a check or a whole module failed."""
        return any(entry.ok is False for entry in self.entries)

    def seconds_left(self) -> float:
        """Time left of the budget; a module that repeats for a better median should look at it."""
        return max(0.0, self._deadline - time.monotonic())

    def add(self, name: str, text: str, ok: bool | None = None, **values: Any) -> None:
        """Add a line; ``values`` go into the JSON file."""
        self.entries.append(Entry(self.module, name, text, ok, values))
        mark = {True: "ok  ", False: "FAIL", None: "    "}[ok]
        self._say(f"  {mark} {name}: {text}")

    def check(self, name: str, ok: bool, text: str = "", **values: Any) -> bool:
        """Add a check and return whether it passed."""
        self.add(name, text or ("passed" if ok else "failed"), bool(ok), **values)
        return bool(ok)

    def time(self, fn: Callable[[], Any], *, warm_up: int = 3, samples: int = 20) -> Timing:
        """Time a call on the current GPU with events, each after a flush of the L2 cache.

        The inputs must not be zeros: power, and so the clock, depends on the data.
        """
        import torch

        flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        for _ in range(warm_up):
            fn()
        pairs = []
        for _ in range(samples):
            flush.random_(0, 255)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return summarise([begin.elapsed_time(end) * 1e-3 for begin, end in pairs])

    def row(self, name: str, ours: Timing, baseline: Timing | None = None, *, nbytes: int = 0, flops: int = 0) -> None:
        """Add one kernel's row: time, rate, per cent of the measured ceiling, ratio to a baseline timed just now.

        Args:
            name: of the kernel, with its shape.
            ours: its time.
            baseline: the time of what it is compared with.
            nbytes: bytes that it has to read and write.
            flops: useful floating-point operations.
        """
        parts = [f"{ours.median_s * 1e6:.0f} us (spread {ours.spread:.1%})"]
        values: dict[str, Any] = {"ours": asdict(ours)}
        for amount, unit, key in ((nbytes, "TB/s", "copy_tb_s"), (flops, "TFLOP/s", "matmul_tflop_s")):
            if amount:
                rate = amount / ours.median_s / 1e12
                values[key] = rate
                of = f", {rate / self.ceilings[key]:.0%} of the ceiling" if key in self.ceilings else ""
                parts.append(f"{rate:.2f} {unit}{of}")
        if baseline is not None:
            ratio = baseline.median_s / ours.median_s
            values |= {"baseline": asdict(baseline), "speedup": ratio}
            parts.append(f"{ratio:.2f}x as fast as the baseline")
        self.add(name, "; ".join(parts), None, **values)


def measure_ceilings(report: GpuReport, *, copy_bytes: int = COPY_BYTES, size: int = MATMUL_SIZE) -> None:
    """Measure what this GPU copies (read plus write) and multiplies in bfloat16, on random data."""
    copy, product = _time_copy(report, copy_bytes), _time_matmul(report, size)
    report.ceilings["copy_tb_s"] = 2 * copy_bytes / copy.median_s / 1e12
    report.ceilings["matmul_tflop_s"] = 2 * size**3 / product.median_s / 1e12
    report.add(
        "copy",
        f"{report.ceilings['copy_tb_s']:.2f} TB/s, read plus write, buffers of {copy_bytes / 1e9:g} GB "
        f"(spread {copy.spread:.1%} of {copy.samples})",
        **asdict(copy),
    )
    report.add(
        "matmul",
        f"{report.ceilings['matmul_tflop_s']:.0f} TFLOP/s, bfloat16, {size} cubed "
        f"(spread {product.spread:.1%} of {product.samples})",
        **asdict(product),
    )


def _time_copy(report: GpuReport, nbytes: int) -> Timing:
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return report.time(lambda: target.copy_(source))


def _time_matmul(report: GpuReport, size: int) -> Timing:
    import torch

    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return report.time(lambda: a @ b)


def run_module(report: GpuReport, name: str, run: Callable[[GpuReport], None] | None = None) -> None:
    """Run one module's checks; what it raises becomes a failed line, and the caller goes on."""
    report.module = name
    if report.seconds_left() == 0:
        report.check("in time", False, "not run: the time budget was used up before it")
        return
    begin = time.monotonic()
    try:
        (run or importlib.import_module(name).run)(report)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        report.check(
            "runs to its end", False, f"{type(error).__name__}: {error} ({where})", trace=traceback.format_exc()
        )
    finally:
        report.add("seconds", f"{time.monotonic() - begin:.1f}", seconds=time.monotonic() - begin)


def _in_process(name: str, budget_s: float, ceilings: dict[str, float], results: Connection) -> None:
    report = GpuReport(budget_s=budget_s)
    report.ceilings |= ceilings
    run_module(report, name, measure_ceilings if name == CEILINGS else None)
    results.send((report.entries, report.ceilings))
    results.close()


def run_isolated(report: GpuReport, name: str) -> None:
    """Run one module in a process of its own: neither a hang nor a broken CUDA context reaches the next module."""
    report.module = name
    limit = report.seconds_left()
    if limit == 0:
        report.check("in time", False, "not run: the time budget was used up before it")
        return
    context = mp.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(name, limit, report.ceilings, send), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(limit):
            report.check("in time", False, f"ended: it still ran when the time budget was used up, after {limit:.0f} s")
            return
        entries, ceilings = receive.recv()
        report.entries += entries
        report.ceilings |= ceilings
    except EOFError:
        process.join(5)
        report.check("runs to its end", False, f"its process ended with code {process.exitcode} and no result")
    finally:
        process.join(1)
        process.kill()
        process.join(5)
        receive.close()


def describe() -> dict[str, Any]:
    """Versions and the GPU's name, without anything that names this machine."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.import_module("triton").__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
    return found


def write_json(report: GpuReport, path: Path) -> None:
    """Write everything found to a JSON file, whole or not at all."""
    data = {
        "machine": describe(),
        "ceilings": report.ceilings,
        "passed": not report.failed,
        "entries": [asdict(entry) for entry in report.entries],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; returns 0 if nothing failed, 1 otherwise, 2 for an unknown module."""
    parser = argparse.ArgumentParser(prog="python -m labs gpu-check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("modules", nargs="*", help=f"only these; there are: {', '.join(CHECK_MODULES) or 'none yet'}")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything (default: %(default)g)")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.modules) - set(CHECK_MODULES))
    if unknown or args.budget <= 0:
        why = (
            f"there is no check {', '.join(unknown)}" if unknown else f"--budget {args.budget:g}: more than 0 is needed"
        )
        print(f"error: {why}; checks are {', '.join(CHECK_MODULES) or 'none yet'}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("This machine shows no CUDA device: there is nothing to check here. That is no failure.")
        return 0
    report = GpuReport(budget_s=args.budget)
    for key, value in describe().items():
        print(f"{key}: {value}")
    for name in (CEILINGS, *(args.modules or CHECK_MODULES)):
        print(name, flush=True)
        run_isolated(report, name)
    checks = [entry.ok for entry in report.entries if entry.ok is not None]
    print(f"{checks.count(True)} checks passed, {checks.count(False)} failed")
    if args.out is not None:
        write_json(report, args.out)
        print(f"results: {args.out}")
    return int(report.failed)
