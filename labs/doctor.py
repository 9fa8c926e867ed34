"""Examines this machine: what is installed, what is connected, how fast, and what would not run here.

It changes nothing, needs no network and says for each gap what it costs the reader. It tells no machine's name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dist_lib.comm import DistContext, LaunchError, collectives, distributed, launch
from dist_lib.models import smollm2_available
from dist_lib.tasks import load_corpus
from labs.framework import ROOT, SCALES, LabError, RunSettings, find_lab, lab_names, load_scale

Level = Literal["ok", "note", "bad"]
PYTHONS = ((3, 11), (3, 13))
PROBE_BYTES = 32 * 2**20
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Finding:
    """One line: ``bad`` means that the project does not work here, ``note`` that a part of it does not."""

    name: str
    level: Level
    text: str


def _python() -> Finding:
    version = platform.python_version()
    fits = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    return Finding("Python", "ok" if fits else "bad", version if fits else f"{version}; needs 3.11 to 3.13")


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def _triton() -> Finding:
    try:
        return Finding("Triton", "ok", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("Triton", "note", "not installed (Linux only): kernels and their tests do not run here")


def _devices() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "note", "no CUDA device: scales toy and ranks run here, gpu and cluster do not")
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Finding("GPU", "ok", ", ".join(f"{p.name} {p.total_memory / 2**30:.0f} GiB" for p in names))


def _driver() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU driver", "note", "none in use")
    path = Path("/proc/driver/nvidia/version")
    first = path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else "version not shown by the system"
    return Finding("GPU driver", "ok", " ".join(first.split()))


def _nccl() -> Finding:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return Finding("NCCL", "note", "not available: several GPUs cannot be used")
    return Finding("NCCL", "ok", ".".join(str(part) for part in torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def time_all_reduce(nbytes: int) -> tuple[float, float]:
    """On each of two ranks: seconds of one all-reduce of ``nbytes`` and of one of a single number (best of 3)."""
    with distributed(device="cpu") as ctx:
        return _best(ctx, nbytes // 4), _best(ctx, 1)


def _best(ctx: DistContext, elements: int) -> float:
    times = []
    for _ in range(4):
        tensor = torch.rand(elements)
        collectives.barrier(group=ctx.group)
        begin = time.perf_counter()
        collectives.all_reduce(tensor, group=ctx.group)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _gloo() -> Finding:
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "bad", "this torch has no gloo: nothing with several processes runs")
    try:
        large, small = launch(time_all_reduce, world_size=2, args=(PROBE_BYTES,), timeout_s=60.0)[0]
    except LaunchError as error:
        last = str(error).strip().splitlines()[-1]
        return Finding("gloo", "bad", f"two processes cannot talk to each other: {last}; see the troubleshooting page")
    # On two ranks a ring all-reduce sends the whole buffer once in each direction.
    text = f"2 ranks on this machine: {PROBE_BYTES / large / 1e9:.2f} GB/s each way, {small * 1e6:.0f} us latency"
    return Finding("gloo", "ok", f"{text} (all-reduce of {PROBE_BYTES / 1e6:.0f} MB, best of 3)")


def memory_gib() -> float:
    """Memory that this process could still get, in GiB: the smaller of what is free and what its group may use."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) / 2**20
    return min(free, _group_limit_gib())


def _group_limit_gib() -> float:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return (int(limit.read_text()) - int(used.read_text())) / 2**30
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def _memory() -> Finding:
    free = memory_gib()
    return Finding("memory", "ok" if free >= 2 else "note", f"{free:.1f} GiB available, {os.cpu_count()} cores")


def _disk() -> Finding:
    free = shutil.disk_usage(ROOT).free / 1e9
    return Finding("disk", "ok" if free >= 5 else "note", f"{free:.0f} GB free (an installation takes about 4 GB)")


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.exists():
        return Finding("shared memory", "note", "no /dev/shm")
    free = shutil.disk_usage(path).free / 2**20
    return Finding("shared memory", "ok" if free >= 64 else "note", f"{free:.0f} MiB free in /dev/shm")


def _corpus() -> Finding:
    corpus = load_corpus()
    return Finding("text corpus", "ok", f"{(len(corpus.train) + len(corpus.val)) / 1e6:.1f} MB, hash as recorded")


def _model() -> Finding:
    if smollm2_available():
        return Finding("SmolLM2-135M", "ok", "installed")
    return Finding("SmolLM2-135M", "note", "not installed: pages that use a real model skip it; `make model` adds it")


def _browser() -> Finding:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path:
        return Finding("Chromium", "ok", Path(path).name)
    return Finding("Chromium", "note", "not found: browser tests are skipped and `make pdf` does not run")


PROBES: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("Python", _python),
    ("torch", _torch),
    ("Triton", _triton),
    ("GPU", _devices),
    ("GPU driver", _driver),
    ("NCCL", _nccl),
    ("gloo", _gloo),
    ("memory", _memory),
    ("disk", _disk),
    ("shared memory", _shared_memory),
    ("text corpus", _corpus),
    ("SmolLM2-135M", _model),
    ("Chromium", _browser),
)


def findings() -> list[Finding]:
    """Run every probe; one that raises becomes a ``bad`` finding and the others go on."""
    found = []
    for name, probe in PROBES:
        try:
            found.append(probe())
        except Exception as error:  # a doctor that dies of the illness helps nobody
            found.append(Finding(name, "bad", f"{type(error).__name__}: {error}"))
    return found


def why_not(run: RunSettings, *, gpus: int, gpu_gib: float, ram_gib: float, disk_mib: float) -> str:
    """Why a scale would not run on a machine with these means; empty if it would."""
    needs_gpu = run.device == "cuda"
    if needs_gpu and gpus == 0:
        return "needs a CUDA device"
    if needs_gpu and gpus < run.world_size:
        return f"needs {run.world_size} GPUs, there are {gpus}; use torchrun on several machines"
    if needs_gpu and gpu_gib < run.memory_gib:
        return f"needs {run.memory_gib:g} GiB on each GPU, there are {gpu_gib:.0f}"
    if not needs_gpu and ram_gib < run.memory_gib:
        return f"needs {run.memory_gib:g} GiB of memory, {ram_gib:.1f} are available"
    return f"needs {run.disk_mib:g} MiB of disk" if disk_mib < run.disk_mib else ""


def would_not_run() -> list[tuple[str, str, str]]:
    """``(lab, scale, reason)`` for every scale of every lab that this machine cannot run."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if gpus else 0.0
    ram_gib, disk_mib = memory_gib(), shutil.disk_usage(ROOT).free / 2**20
    rows = []
    for name in lab_names():
        for scale in SCALES:
            try:
                _, run = load_scale(find_lab(name), scale)
                reason = why_not(run, gpus=gpus, gpu_gib=gpu_gib, ram_gib=ram_gib, disk_mib=disk_mib)
            except (LabError, ImportError) as error:
                reason = str(error)
            if reason:
                rows.append((name, scale, reason))
    return rows


def examine(console: Console) -> bool:
    """Print everything; returns whether the project works here (gaps that only cost a part are no failure)."""
    found = findings()
    table = Table(title="This machine", show_header=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[bold red]bad[/]"}
    for finding in found:
        table.add_row(marks[finding.level], finding.name, finding.text)
    console.print(table)
    missing = would_not_run()
    if missing:
        table = Table(title="Would not run here")
        for column in ("lab", "scale", "why"):
            table.add_column(column)
        for row in missing:
            table.add_row(*row)
        console.print(table)
    return all(finding.level != "bad" for finding in found)
