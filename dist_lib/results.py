"""Records of runs: what was run, on what, and what came out, in one JSON file that outlives the process.

A record is written whole or not at all. :func:`compare` puts several side by side.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

RECORD = "record.json"


class RecordError(ValueError):
    """A file that is not a run record."""


@dataclass
class RunRecord:
    """One run of a lab.

    Attributes:
        lab, scale, seed: what was run.
        config: the lab's configuration, as plain data.
        world_size, device: on how many ranks, of what kind.
        metrics: final numbers by name.
        history: one mapping a logged step, each with ``step``.
        timings: seconds by name.
        peak_memory_bytes: resident memory of rank 0, or allocated memory of its GPU.
        status: ``"finished"``, ``"interrupted"`` or ``"failed"``.
        versions, hardware, commit, started: of the run.
    """

    lab: str
    scale: str
    seed: int
    config: dict[str, Any]
    world_size: int = 1
    device: str = "cpu"
    metrics: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    status: str = "finished"
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    started: str = ""


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it first, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(record: RunRecord, directory: Path) -> Path:
    """Write ``directory/record.json``; NaN and infinity are refused, for they are not JSON.

    Raises:
        RecordError: naming what cannot be written.
    """
    try:
        text = json.dumps(asdict(record), indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"the record of lab {record.lab!r} cannot be written: {error}") from error
    path = directory / RECORD
    write_text(path, text + "\n")
    return path


def load(path: Path) -> RunRecord:
    """Read a record from its file or its directory.

    Raises:
        RecordError: no such file, damaged JSON, missing or unknown entries.
    """
    file = path / RECORD if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        unknown = set(data) - {f.name for f in fields(RunRecord)}
        if unknown:
            raise RecordError(f"{file}: unknown entries {sorted(unknown)}")
        return RunRecord(**data)
    except FileNotFoundError as error:
        raise RecordError(f"there is no run record at {file}") from error
    except (json.JSONDecodeError, TypeError) as error:
        raise RecordError(f"{file} is not a run record: {error}") from error


def compare(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Rows of a table: every setting that differs between the records, then every metric.

    Returns:
        ``{name: [value in each record]}``; None where a record has no such entry.
    """
    rows: dict[str, list[Any]] = {}
    for part in ("config", "metrics"):
        names: dict[str, None] = {}
        for record in records:
            names.update(dict.fromkeys(getattr(record, part)))
        for name in names:
            values = [getattr(record, part).get(name) for record in records]
            if part == "metrics" or any(v != values[0] for v in values):
                rows[name] = values
    for name in ("scale", "seed", "world_size", "device"):
        values = [getattr(record, name) for record in records]
        if any(v != values[0] for v in values):
            rows[name] = values
    return rows


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy", "plotly"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores and GPUs, without anything that names this machine."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    out: dict[str, Any] = {"cpu": model, "cores": os.cpu_count() or 1, "system": platform.system()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        out["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return out


def commit(root: Path | None = None) -> str:
    """Short hash of the checked-out commit, with ``+`` if files differ from it; empty outside a repository."""
    try:
        options: Mapping[str, Any] = {"cwd": root, "capture_output": True, "text": True, "timeout": 5, "check": True}
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **options).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(head) + ("+" if dirty else "")


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far, or what its GPU allocated at most if it has used one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
