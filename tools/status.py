"""The status file `data/results/status.json`: what the last recorded run took, and on what machine.

The file has four keys. `notebooks` maps a notebook's path to `seconds` and `peak_memory_gib`; `tests` maps a part of
`make test` to `minutes`, `passed`, `failed` and `skipped`; `hardware` and `versions` say where. The book's status page
and its minute badges read it. It is written by `make execute` and by `tools/run_tests.py --save` only.
"""

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATUS = ROOT / "data" / "results" / "status.json"
PACKAGES = ("torch", "triton", "numpy", "plotly", "jupyter-book", "Sphinx", "nbval", "pytest")


def machine() -> dict[str, Any]:
    """Return processor, cores and memory, without the machine's name."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "system": platform.system()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def update(section: str, entries: dict[str, Any], *, keep_only: set[str] | None = None, path: Path = STATUS) -> None:
    """Merge `entries` into one section of the status file and refresh the machine's description.

    Entries of the section that are not in `keep_only` (when given) are dropped: notebooks that are gone.
    """
    status = json.loads(path.read_text()) if path.exists() else {}
    merged = status.get(section, {}) | entries
    if keep_only is not None:
        merged = {key: value for key, value in merged.items() if key in keep_only}
    status |= {section: merged, "hardware": machine(), "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(status, indent=2, sort_keys=True) + "\n")
