"""Run the tests part by part, go on after a failing part, and print what each part took.

A part is a list of commands. A pytest command counts its tests (read from its JUnit file), any other command counts as
one test. The last line is `N passed, N failed, N skipped`; the exit status is 0 only when nothing failed. In CI
(`CI=true`) a skip counts as a failure unless its reason is in `ALLOWED_SKIPS`: there, a missing tool is a fault.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "_build" / "tests"
PARTS = ("lint", "unit", "kernels", "distributed", "labs", "notebooks", "book", "packaging")
# Folders of tests/ that belong to a part of another name; every folder not named here belongs to `unit`.
FOLDERS = {
    "kernels": ("kernels",),
    "distributed": ("comm", "distributed"),
    "labs": ("labs",),
    "notebooks": ("notebooks",),
    "book": ("book", "browser"),
    "packaging": ("packaging",),
}
ALLOWED_SKIPS = re.compile(r"CUDA|GPU|needs root|allows no shaped link", re.IGNORECASE)  # what a machine may not have
COLORS = {"title": "\033[1m", "bad": "\033[31m", "end": "\033[0m"} if sys.stdout.isatty() else {}


@dataclass
class Outcome:
    """Counts and time of one part."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Add the counts and notes of another outcome."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.notes += other.notes


def folders_of(part: str, tests: Path = ROOT / "tests") -> list[str]:
    """Return the existing folders of a part; `unit` takes every folder that no other part names."""
    present = {p.name for p in tests.iterdir() if p.is_dir() and any(p.rglob("test_*.py"))}
    taken = {name for names in FOLDERS.values() for name in names}
    names = present - taken if part == "unit" else present & set(FOLDERS[part])
    return [f"tests/{name}" for name in sorted(names)]


def notebooks(root: Path = ROOT) -> list[str]:
    """Return every notebook that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.ipynb"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    return sorted({name for name in listed if name and (root / name).exists()})


def commands(part: str) -> list[list[str]]:
    """Return the commands of a part; a command whose third word is `pytest` is counted test by test."""
    python, pytest = sys.executable, [sys.executable, "-m", "pytest", "-q"]
    if part == "lint":
        return [
            [python, "-m", "ruff", "check", "."],
            [python, "-m", "ruff", "format", "--check", "."],
            [python, "-m", "mypy"],
            [python, "-m", "mypy", "--strict", *sorted(f"tools/{p.name}" for p in (ROOT / "tools").glob("*.py"))],
            [str(Path(python).parent / "lint-imports")],
        ]
    folders = folders_of(part)
    spread = "load" if part == "book" else "loadfile"  # the browser's pages are one file
    tested = [[*pytest, "-n", "2", "--dist", spread, *folders]] if folders else []
    if part == "notebooks" and notebooks():
        nbval = ["-p", "tests.notebooks.plugin", "--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120"]
        tested.append([*pytest, "-n", "2", "--dist", "loadfile", *nbval, "--timeout", "600", *notebooks()])
    if part == "book" and (ROOT / "_config.yml").exists():
        tested.insert(0, [python, "tools/build_book.py"])
    return tested


def read_report(path: Path, *, ci: bool) -> Outcome:
    """Count the tests in a JUnit file; in CI a skip that is not allowed counts as failed."""
    outcome = Outcome()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
            outcome.notes.append(f"failed: {name}")
        elif skip is None or skip.get("type") == "pytest.xfail":
            outcome.passed += 1
        else:
            reason = skip.get("message") or ""
            unwanted = ci and not ALLOWED_SKIPS.search(reason)
            outcome.failed += unwanted
            outcome.skipped += not unwanted
            outcome.notes.append(f"{'skipped in CI, so failed' if unwanted else 'skipped'}: {name}: {reason}")
    return outcome


def run_command(command: list[str], report: Path, environment: dict[str, str]) -> Outcome:
    """Run one command with its output shown, and count it."""
    counted = command[2:3] == ["pytest"]
    shown = " ".join([Path(command[0]).name, *command[1:]])
    print(f"$ {shown}", flush=True)
    report.unlink(missing_ok=True)
    extra = [f"--junitxml={report}"] if counted else []
    status = subprocess.run([*command, *extra], cwd=ROOT, env=environment, check=False).returncode
    if not counted:
        return Outcome(passed=1) if status == 0 else Outcome(failed=1, notes=[f"failed: {shown}"])
    if not report.exists():
        return Outcome(failed=1, notes=[f"failed before any test ran (exit status {status}): {shown}"])
    outcome = read_report(report, ci=environment.get("CI") == "true")
    if status not in (0, 1) or (status == 1 and outcome.failed == 0):
        outcome.add(Outcome(failed=1, notes=[f"failed with exit status {status}: {shown}"]))
    return outcome


def run_part(part: str, environment: dict[str, str]) -> Outcome:
    """Run every command of a part."""
    total, started = Outcome(), time.monotonic()
    for number, command in enumerate(commands(part)):
        total.add(run_command(command, REPORTS / f"{part}-{number}.xml", environment))
    total.seconds = time.monotonic() - started
    return total


def summary(outcomes: dict[str, Outcome]) -> str:
    """Return the table of parts and the last line with all counts."""
    lines = [f"\n{'part':<14}{'minutes':>8}{'passed':>9}{'failed':>9}{'skipped':>9}"]
    total = Outcome()
    for part, outcome in outcomes.items():
        total.add(outcome)
        minutes = outcome.seconds / 60
        lines.append(f"{part:<14}{minutes:>8.1f}{outcome.passed:>9}{outcome.failed:>9}{outcome.skipped:>9}")
    minutes = sum(o.seconds for o in outcomes.values()) / 60
    lines.append(f"{'all':<14}{minutes:>8.1f}{total.passed:>9}{total.failed:>9}{total.skipped:>9}\n")
    lines += total.notes
    lines.append(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return "\n".join(lines)


def main() -> int:
    """Run the chosen parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--save", action="store_true", help="also write the minutes into data/results/status.json")
    args = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PATH": path}
    outcomes: dict[str, Outcome] = {}
    for part in PARTS:
        if part in args.parts:
            print(f"\n{COLORS.get('title', '')}== {part}{COLORS.get('end', '')}", flush=True)
            outcomes[part] = run_part(part, environment)
    record = {
        part: {"minutes": round(o.seconds / 60, 2), "passed": o.passed, "failed": o.failed, "skipped": o.skipped}
        for part, o in outcomes.items()
    }
    (REPORTS / "minutes.json").write_text(json.dumps(record, indent=2) + "\n")
    print(summary(outcomes))
    failed = any(outcome.failed for outcome in outcomes.values())
    if args.save and not failed:
        import status

        status.update("tests", record, keep_only=set(PARTS))
    elif args.save:
        print("nothing was saved, because tests failed", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
