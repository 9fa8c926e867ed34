"""Build the book from the stored outputs, with warnings as errors.

Sphinx does not see that a page depends on the library (API pages), on recorded data (claims, status) or on the pinned
versions. So this script keeps a hash of those next to the build and removes the old build when the hash changes. It
executes nothing: notebooks are shown as they are stored (`tools/execute_notebooks.py` refreshes them).
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
INPUTS = ("dist_lib", "data", "labs", "book/_ext", "book/_static", "constraints.txt", "_config.yml", "_toc.yml")
IGNORED = {".pyc", ".pyo"}


def inputs_hash(root: Path = ROOT) -> str:
    """Return the hash of every file that pages depend on without Sphinx knowing it."""
    digest = hashlib.sha256()
    for name in INPUTS:
        start = root / name
        files = sorted(p for p in start.rglob("*") if p.is_file()) if start.is_dir() else [start]
        for path in files:
            if path.suffix in IGNORED or not path.exists():
                continue
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def main() -> int:
    """Build, and say where the book lies; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="remove the old build first")
    args = parser.parse_args()
    current, stored = inputs_hash(), BUILD / "inputs.sha256"
    if args.fresh or not stored.exists() or stored.read_text() != current:
        for old in ("html", ".doctrees", "jupyter_execute"):
            shutil.rmtree(BUILD / old, ignore_errors=True)
    started = time.monotonic()
    command = [str(Path(sys.executable).parent / "jupyter-book"), "build", ".", "-W", "-n", "--keep-going"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status != 0:
        stored.unlink(missing_ok=True)
        print("book: the build failed; the warnings above are the reason.", file=sys.stderr)
        return status
    BUILD.mkdir(exist_ok=True)
    stored.write_text(current)
    print(f"book: built in {(time.monotonic() - started) / 60:.1f} minutes. Open _build/html/index.html in a browser,")
    print("      or run `make serve` and open http://127.0.0.1:8000/")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
