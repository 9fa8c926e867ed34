"""``python -m dist_lib.dmuon plan``: its text, its JSON, its file, its refusals."""

import json
import subprocess
import sys

import pytest

from dist_lib.dmuon import OwnerPlan, make_plan
from dist_lib.dmuon.bytes import Sizes, step_payload
from dist_lib.dmuon.cli import main
from dist_lib.dmuon.cost_model import Hardware
from dist_lib.dmuon.workloads import workload


def output(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_json_holds_the_plans_numbers(capsys, tmp_path):
    file = tmp_path / "plan.json"
    found = json.loads(
        output(capsys, "--model", "llama3-8b", "--world-size", "16", "--nodes", "2", "--json", "--save", str(file))
    )
    plan = make_plan(workload("llama3-8b"), 16, nodes=2, cost=Hardware().owned_cost())
    assert OwnerPlan.from_json(file.read_text()) == plan
    assert [r["load"] for r in found["ranks"]] == list(plan.rank_loads)
    assert [r["state_bytes"] for r in found["ranks"]] == list(plan.bytes_per_rank)
    assert found["payload_bytes"] == step_payload("ddp", plan, Sizes(weight=2, gradient=4))[0]
    assert found["loads"]["lower_bound"] == plan.lower_bound
    assert found["seconds"]["dmuon"] == pytest.approx(max(plan.rank_loads) + found["seconds"]["memory"] + 7e-3)
    assert [r["node"] for r in found["ranks"]] == [0] * 8 + [1] * 8


def test_text_shows_every_rank_or_a_summary(capsys):
    few = output(capsys, "--model", "tiny-0.3m", "--world-size", "2", "--method", "milp", "--cost", "flops")
    assert "1 (0:1)" in few and "fullest over bound" in few and "TFLOP" in few
    many = output(
        capsys,
        "--model",
        "wallx",
        "--world-size",
        "64",
        "--nodes",
        "8",
        "--mode",
        "hsdp-free",
        "--shards",
        "8",
        "--cost",
        "a800",
    )
    assert "median" in many and "DMuon, HSDP, weights freed" in many and "14.127 ms" in many


def test_weights_hide_behind_compute(capsys):
    arguments = ["--model", "llama3-8b", "--world-size", "8", "--json"]
    open_, hidden = (
        json.loads(output(capsys, *arguments, *more))["seconds"]["publish_exposed"]
        for more in ([], ["--tokens", "16384"])
    )
    assert hidden < 0.1 * open_  # only the first layer has nothing before it


def test_matrices_and_times_of_ones_own(capsys, tmp_path):
    names, times = tmp_path / "names.json", tmp_path / "times.json"
    names.write_text('{"layers.0.w": [4, 6], "layers.1.w": [6, 4], "layers.2.w": [4, 6]}')
    times.write_text('{"4x6": {"1": 2.0, "2": 2.5}}')
    found = json.loads(
        output(
            capsys, "--matrices", str(names), "--world-size", "2", "--cost", str(times), "--method", "milp", "--json"
        )
    )
    assert sorted(r["load"] for r in found["ranks"]) == [2.0, 2.5]  # only equal orientations go together
    assert found["unit"] == "s" and found["matrices"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny-0.3m", "--world-size", "4", "--nodes", "3"], "same number on every node"),
        (["--model", "tiny-0.3m", "--world-size", "4", "--cost", "guess"], "flops, device, a800"),
        (["--model", "tiny-0.3m", "--world-size", "4", "--mode", "hsdp-keep", "--shards", "3"], "divisor of the world"),
        (["--matrices", "missing.json", "--world-size", "4"], "missing.json"),
    ],
)
def test_refusals_go_to_standard_error(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith("error: ") and message in found.err


def test_bad_files_are_explained(capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"a": 3}')
    assert main(["plan", "--matrices", str(bad), "--world-size", "2"]) == 2
    assert "names and shapes" in capsys.readouterr().err
    assert main(["plan", "--model", "tiny-0.3m", "--world-size", "2", "--cost", str(bad)]) == 2
    assert "times in seconds by shape" in capsys.readouterr().err


def test_help_names_the_commands():
    done = subprocess.run(
        [sys.executable, "-m", "dist_lib.dmuon", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "plan" in done.stdout
