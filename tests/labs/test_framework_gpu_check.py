"""gpu-check: needs torch, triton and numpy alone; without CUDA it has nothing to do; a broken check stops no other."""

import json
import subprocess
import sys

import pytest
import torch

from labs import gpu_check
from labs.gpu_check import GpuReport, run_module, summarise

BLOCKER = """
import runpy, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked by the test")

sys.meta_path.insert(0, Block())
sys.argv = ["labs", *{arguments!r}]
runpy.run_module("labs", run_name="__main__")
"""
BLOCKED = ("typer", "rich", "plotly", "transformers", "sympy", "psutil", "click")


def run_blocked(*arguments):
    code = BLOCKER.format(blocked=BLOCKED, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def test_it_runs_without_the_packages_of_the_other_commands():
    done = run_blocked("gpu-check", "--budget", "60")
    assert done.returncode == 0, done.stderr
    if not torch.cuda.is_available():
        assert "nothing to check" in done.stdout


def test_the_blocker_would_notice():
    done = run_blocked("list")
    assert done.returncode != 0 and "blocked by the test" in done.stderr


def test_every_registered_check_can_be_imported():
    import importlib

    assert all(callable(importlib.import_module(name).run) for name in gpu_check.CHECK_MODULES)
    assert len(set(gpu_check.CHECK_MODULES)) == len(gpu_check.CHECK_MODULES)


def test_a_broken_check_is_reported_and_the_next_one_runs(tmp_path):
    lines = []
    report = GpuReport(say=lines.append)
    run_module(report, "first", lambda r: 1 / 0)
    run_module(report, "second", lambda r: r.check("adds", 1 + 1 == 2, value=2))
    assert report.failed and any("ZeroDivisionError" in line and "FAIL" in line for line in lines)
    assert any("ok" in line and "adds" in line for line in lines)
    gpu_check.write_json(report, tmp_path / "out" / "gpu.json")
    data = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert data["passed"] is False and [e["module"] for e in data["entries"] if e["name"] == "adds"] == ["second"]


def test_a_used_up_budget_is_a_failure_not_a_pass():
    report = GpuReport(budget_s=0.0, say=lambda line: None)
    run_module(report, "late", lambda r: r.check("never", True))
    assert report.failed and [e.name for e in report.entries] == ["in time"]


def test_a_row_states_rate_share_of_the_ceiling_and_ratio():
    report = GpuReport(say=lambda line: None)
    report.ceilings["copy_tb_s"] = 4.0
    ours, theirs = summarise([0.5e-3] * 5), summarise([1e-3] * 5)
    report.row("pack", ours, theirs, nbytes=10**9)
    text = report.entries[0].text
    assert "500 us" in text and "2.00 TB/s" in text and "50% of the ceiling" in text and "2.00x" in text


def test_quartiles_and_too_few_times():
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0]).median_s == 3.0
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least 3"):
        summarise([1.0, 2.0])


def test_an_unknown_module_or_budget_is_refused(capsys):
    assert gpu_check.main(["nothing"]) == 2 and "no check nothing" in capsys.readouterr().err
    assert gpu_check.main(["--budget", "0"]) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os; os._exit(7)", "code 7"),
        ("import time; time.sleep(60)", "still ran"),
        ("raise KeyError('planted')", "planted"),
        ("report.check('fine', True)", ""),
    ],
    ids=["dies", "hangs", "raises", "passes"],
)
def test_a_module_in_its_own_process_cannot_take_the_others_along(tmp_path, monkeypatch, body, words):
    (tmp_path / "check_of_a_test.py").write_text(f"def run(report):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = GpuReport(budget_s=3.0 if "sleep" in body else 60.0, say=lambda line: None)
    gpu_check.run_isolated(report, "check_of_a_test")
    assert report.failed is bool(words)
    assert any(words in entry.text for entry in report.entries if entry.ok is False) or not words
    assert words or any(entry.name == "fine" for entry in report.entries)
