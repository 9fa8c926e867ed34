"""The command line: every command answers --help, mistakes get one line, Ctrl-C leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from labs import running
from labs.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("list", "run", "check", "compare", "report", "bench", "doctor")
QUICK = ["--set", "steps=2", "--set", "batch_size=4", "--set", "seq_len=16", "--set", "shards=1"]


def call(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = call(command, "--help")
    assert done.exit_code == 0 and "Usage" in done.output and len(done.output.splitlines()) > 4


def test_the_overview_names_every_command():
    output = call("--help").output
    assert all(command in output for command in (*COMMANDS, "gpu-check"))


def test_the_list_shows_every_scale_with_its_needs():
    done = call("list")
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("baseline", "toy", "ranks", "gpu", "cluster", "minutes", "GiB", "MiB"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "baselin"], "there is no lab 'baselin' (did you mean 'baseline'?)"),
        (["run", "baseline", "--set", "stepz=3"], "did you mean 'steps'"),
        (["run", "baseline", "--scale", "huge"], "there are toy, ranks, gpu, cluster"),
        (["run", "baseline", "--world-size", "0"], "at least 1 process"),
        (["run", "baseline", "--device", "tpu"], "auto, cpu or cuda"),
        (["run", "baseline", "--resume", "nowhere"], "not the folder of a run"),
        (["run", "baseline", "--resume", "latest", "--seed", "0"], "leave out --seed"),
        (["run", "baseline", "--resume", "latest", "--scale", "toy", "--set", "a=1"], "leave out --scale, --set"),
        (["check", "baseline", "nothing"], "no exercise 'nothing'"),
        (["check", "baseline", "--file", "x.py"], "--file needs the name"),
        (["compare", "nowhere"], "no run record"),
        (["report", "nowhere"], "no run record"),
        (["bench", "nothing"], "no lab 'nothing'"),
    ],
)
def test_a_mistake_gets_one_line_that_says_what_is_allowed(arguments, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert words in done.output and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())  # a refused run leaves no folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_no_traceback(tmp_path):
    done = call("run", "baseline", "--device", "cuda", "--out", str(tmp_path))
    assert done.exit_code == 1 and "use --device cpu" in done.output and not list(tmp_path.iterdir())


def test_a_dry_run_shows_the_settings_and_leaves_nothing(tmp_path):
    done = call("run", "baseline", "--set", "steps=7", "--dry-run", "--out", str(tmp_path))
    assert done.exit_code == 0 and "steps=7" in done.output and not list(tmp_path.iterdir())


def test_runs_are_recorded_compared_and_reported(tmp_path):
    for seed in ("1", "2"):
        done = call("run", "baseline", "--device", "cpu", "--seed", seed, "--out", str(tmp_path), *QUICK)
        assert done.exit_code == 0, done.output
    first, second = sorted((tmp_path / "baseline").iterdir())
    assert json.loads((first / "record.json").read_text())["status"] == "finished"
    compared = call("compare", str(first), str(second))
    assert compared.exit_code == 0 and "validation_loss" in compared.output and "seed" in compared.output
    page = (first / "report.html").read_text()
    assert "<table" in page and "Plotly" in page and 'src="http' not in page
    (first / "report.html").unlink()
    assert call("report", str(first)).exit_code == 0 and (first / "report.html").exists()


def test_a_diverged_run_is_recorded_as_such():
    values = {"loss": float("nan"), "norm": float("inf"), "steps": 3, "rate": 0.5}
    assert running.finite(values) == {"loss": None, "norm": None, "steps": 3, "rate": 0.5}


def descendants(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            child = int(stat.parent.name)
            found += [child, *descendants(child)]
    return found


def test_ctrl_c_ends_every_process_and_the_run_can_go_on(tmp_path):
    command = [sys.executable, "-m", "labs", "run", "baseline", "--out", str(tmp_path)]
    options = ["--scale", "ranks", "--set", "steps=100000", "--set", "save_every=1", "--set", "batch_size=4"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that starts the tests with `&` makes them, and so this process, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("baseline/*/state.pt")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
        children = descendants(process.pid)
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    assert process.returncode == 130 and "--resume" in output and "Traceback" not in output, output
    deadline = time.monotonic() + 10
    while [c for c in children if Path(f"/proc/{c}").exists()] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [c for c in children if Path(f"/proc/{c}").exists()]
    (directory,) = (tmp_path / "baseline").iterdir()
    record = json.loads((directory / "record.json").read_text())
    assert record["status"] == "interrupted" and record["history"]
    request = json.loads((directory / "request.json").read_text())
    request["config"]["steps"] = record["history"][-1]["step"] + 2  # a run to its end, in the test's time
    (directory / "request.json").write_text(json.dumps(request))
    again = subprocess.run(
        [*command, "--resume", str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert again.returncode == 0, again.stdout + again.stderr
    resumed = json.loads((directory / "record.json").read_text())
    steps = [row["step"] for row in resumed["history"]]
    assert steps == list(range(steps[0], steps[0] + len(steps))) and resumed["status"] == "finished"
