"""Rules for every tracked file: units, scripts that answer --help, no machine paths, no loose ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.run_tests import FOLDERS, PARTS, Outcome, commands, folders_of, notebooks, read_report, summary

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".ipynb", ".toml", ".yml", ".yaml", ".cff", ".sh", ".css", ".js", ".json", ".bib", ".txt", ""}
SELF = "tests/packaging/test_repository.py"
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:work|home|root|Users)/\w+")
LOOSE_ENDS = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|NotImplementedError|[Ll]orem ipsum")
# A rate is decimal; memory of a device is binary; KB and kB are ambiguous.
AMBIGUOUS_UNITS = re.compile(
    r"\d\s*(?:KB|Kb|gb|mb|GiBps|GBps)\b|\d\s*(?:GiB|MiB)/s\b|\bGPU memory[^.\n]{0,40}\d\s*GB\b"
)


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    return sorted(name for name in names if name and Path(name).suffix in TEXT and (ROOT / name).is_file())


def matches(pattern: re.Pattern[str], names: list[str]) -> list[str]:
    found = []
    for name in names:
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if match := pattern.search(line):
                found.append(f"{name}:{number}: {match.group(0)}")
    return found


def test_no_machine_paths() -> None:
    assert matches(MACHINE_PATH, [name for name in tracked() if name != SELF]) == []


def test_no_loose_ends() -> None:
    stubs = [name for name in tracked() if "/exercises/" in name]
    assert matches(LOOSE_ENDS, [name for name in tracked() if name != SELF and name not in stubs]) == []


def test_units_say_decimal_or_binary() -> None:
    pages = [
        name for name in tracked() if Path(name).suffix in {".md", ".ipynb"} or name.startswith(("labs/", "dist_lib/"))
    ]
    assert matches(AMBIGUOUS_UNITS, pages) == []


@pytest.mark.parametrize("line", ["costs 12 KB", "moves 3 GiB/s", "GPU memory of 80 GB"])
def test_an_ambiguous_unit_is_found(line: str) -> None:
    assert AMBIGUOUS_UNITS.search(line)


@pytest.mark.parametrize("line", ["moves 3 GB/s", "holds 80 GiB", "costs 12 kB", "GPU memory of 74.5 GiB"])
def test_a_clear_unit_passes(line: str) -> None:
    assert not AMBIGUOUS_UNITS.search(line)


def scripts() -> list[str]:
    """Every Python or shell script that is started by its path, and every lab that is started as a module."""
    names = [name for name in tracked() if name.startswith(("tools/", "labs/")) and name.endswith((".py", ".sh"))]
    return [
        name
        for name in names
        if name.endswith(".sh") or '__name__ == "__main__"' in (ROOT / name).read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", scripts())
def test_a_script_answers_help(name: str) -> None:
    if name.endswith(".sh"):
        command = ["bash", name, "--help"]
    elif name.startswith("labs/"):
        command = [sys.executable, "-m", name[: -len(".py")].replace("/", ".").removesuffix(".__main__"), "--help"]
    else:
        command = [sys.executable, name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_every_test_folder_belongs_to_one_part() -> None:
    listed = [folder for part in PARTS if part != "lint" for folder in folders_of(part)]
    present = {f"tests/{p.name}" for p in (ROOT / "tests").iterdir() if p.is_dir() and any(p.rglob("test_*.py"))}
    assert sorted(listed) == sorted(present)
    assert set(FOLDERS) <= set(PARTS)


def test_the_notebook_part_runs_every_notebook() -> None:
    named = {word for command in commands("notebooks") for word in command if word.endswith(".ipynb")}
    assert named == set(notebooks())


REPORT = """<testsuites><testsuite><testcase classname="a" name="b"/>
<testcase classname="a" name="c"><failure message="x"/></testcase>
<testcase classname="a" name="d"><skipped type="pytest.skip" message="no Chromium on the PATH"/></testcase>
<testcase classname="a" name="e"><skipped type="pytest.skip" message="needs CUDA"/></testcase>
</testsuite></testsuites>"""


def test_a_skip_for_a_missing_tool_fails_in_ci(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    here, in_ci = read_report(path, ci=False), read_report(path, ci=True)
    assert (here.passed, here.failed, here.skipped) == (1, 1, 2)
    assert (in_ci.passed, in_ci.failed, in_ci.skipped) == (1, 2, 1)
    assert any("no Chromium" in note for note in in_ci.notes)


def test_the_last_line_adds_the_parts() -> None:
    text = summary({"unit": Outcome(passed=3, skipped=1), "labs": Outcome(passed=2, failed=1, notes=["failed: x"])})
    assert text.split("\n")[-1] == "5 passed, 1 failed, 1 skipped"
    assert "failed: x" in text


REMOTE_ASSET = re.compile(
    r"@import|@font-face|url\(\s*['\"]?(?:https?:)?//|<link[^>]+href=['\"]?(?:https?:)?//", re.IGNORECASE
)


def test_the_books_style_fetches_no_font() -> None:
    names = [
        name for name in tracked() if name.startswith(("book/_static/", "book/_ext/")) and not name.endswith(".svg")
    ]
    assert "book/_static/book.css" in names
    assert matches(REMOTE_ASSET, names) == []


@pytest.mark.parametrize(
    "line", ["@import 'a.css';", "src: url(https://example.org/a.woff2)", "src: url('//example.org/a')"]
)
def test_a_remote_font_is_found(line: str) -> None:
    assert REMOTE_ASSET.search(line)
    assert not REMOTE_ASSET.search("background: url(data:image/svg+xml,%3Csvg%3E)")
