"""Run notebooks again in place and store their outputs, without anything that changes from run to run by itself.

Each notebook gets a fresh kernel with one thread. Time stamps, widget states and the interpreter's version are removed
from its metadata. What the run took (seconds, and the peak of resident memory over the kernel and its child processes,
pages shared by processes counted once for each) goes into `data/results/status.json`, which the book shows.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import status
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from run_tests import notebooks

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 120


class MemoryWatch(threading.Thread):
    """Follows the resident memory of this process's children (the kernel and its ranks) until stopped."""

    def __init__(self, interval_s: float = 0.1) -> None:
        super().__init__(daemon=True)
        self.interval_s, self.peak_bytes = interval_s, 0
        self._end = threading.Event()

    def run(self) -> None:
        """Poll until stopped."""
        own = psutil.Process()
        while not self._end.wait(self.interval_s):
            total = 0
            for child in own.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> int:
        """End the thread and return the peak in bytes."""
        self._end.set()
        self.join()
        return self.peak_bytes


def clean(notebook: nbformat.NotebookNode) -> None:
    """Remove what differs between runs or machines."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        for key in ("execution", "ExecuteTime", "collapsed", "scrolled"):
            cell.metadata.pop(key, None)


def execute(name: str) -> dict[str, float]:
    """Run one notebook in place; return its seconds and its peak memory in GiB."""
    path = ROOT / name
    notebook = nbformat.read(path, as_version=4)
    watch, started = MemoryWatch(), time.monotonic()
    watch.start()
    try:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
        )
        client.execute()
    finally:
        peak = watch.stop()
    seconds = time.monotonic() - started
    clean(notebook)
    nbformat.write(notebook, path)
    return {"seconds": round(seconds, 1), "peak_memory_gib": round(peak / 2**30, 2)}


def main() -> int:
    """Run the chosen notebooks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="paths from the repository root (default: every notebook)")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    failed, measured = [], {}
    for name in args.notebooks or notebooks():
        if not (ROOT / name).exists():
            parser.error(f"there is no notebook {name}; give paths from the repository root")
        print(f"{name} ...", flush=True)
        try:
            measured[name] = execute(name)
        except CellExecutionError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"  {measured[name]['seconds']:.1f} s, {measured[name]['peak_memory_gib']:.2f} GiB", flush=True)
    if measured:
        status.update("notebooks", dict(measured), keep_only=set(notebooks()))
    if failed:
        print(f"execute: {len(failed)} failed and were left as they were: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
