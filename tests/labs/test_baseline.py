"""The baseline lab: equal to its twin bit for bit, resumable, counted; its exercises graded."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dist_lib.comm import RankError, distributed, launch
from labs.baseline.run import LAB, Config, payload_bytes_per_step
from labs.framework import RunContext, load_scale

ROOT = Path(__file__).resolve().parents[2]
SMALL = Config(model="tiny-0.3m", steps=3, batch_size=8, seq_len=16, save_every=2)


def trained(config, directory, resumed=False):
    """Run the lab; return metrics and the losses as exact numbers."""
    with distributed(device="cpu") as ctx:
        torch.manual_seed(0)
        context = RunContext(ctx, 0, Path(directory), resumed)
        metrics = LAB.run(config, context)
        return metrics, [row["loss"] for row in context.history]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_their_single_process_twin_bit_for_bit(world_size, tmp_path):
    ranks = launch(trained, world_size=world_size, args=(SMALL, str(tmp_path)))
    twin_metrics, twin_losses = trained(dataclasses.replace(SMALL, shards=world_size), tmp_path)
    metrics, losses = ranks[0]
    assert losses == twin_losses
    assert metrics["validation_loss"] == twin_metrics["validation_loss"]
    assert all(r[0]["validation_loss"] == metrics["validation_loss"] for r in ranks)
    expected = payload_bytes_per_step(metrics["parameters"], world_size)
    assert all(r[0]["payload_bytes_counted"] == expected for r in ranks)
    assert all(r[0]["held_bytes_counted"] == r[0]["held_bytes_predicted"] > 0 for r in ranks)


def test_unordered_sums_and_uneven_shards_stay_close_to_the_whole_batch(tmp_path):
    whole = trained(SMALL, tmp_path)[1]
    uneven = dataclasses.replace(SMALL, shards=3)
    metrics, losses = trained(uneven, tmp_path)
    assert losses == pytest.approx(whole, rel=1e-5)
    assert metrics["held_bytes_counted"] == metrics["held_bytes_predicted"]
    loose = launch(trained, world_size=2, args=(dataclasses.replace(SMALL, ordered=False), str(tmp_path)))
    assert loose[0][1] == pytest.approx(whole, rel=1e-5)


def test_what_is_predicted_is_what_is_counted(tmp_path):
    metrics, losses = trained(SMALL, tmp_path)
    assert metrics["held_bytes_counted"] == metrics["held_bytes_predicted"] > 0
    assert metrics["payload_bytes_counted"] == metrics["payload_bytes_predicted"] == 0
    assert losses[-1] < losses[0]


def test_a_resumed_run_has_the_same_bits(tmp_path):
    full = trained(dataclasses.replace(SMALL, steps=4), tmp_path / "full")[1]
    trained(dataclasses.replace(SMALL, steps=2), tmp_path / "cut")
    metrics, resumed = trained(dataclasses.replace(SMALL, steps=4), tmp_path / "cut", resumed=True)
    assert resumed == full
    again, _ = trained(dataclasses.replace(SMALL, steps=4), tmp_path / "cut", resumed=True)  # nothing left to do
    for key in ("final_loss", "validation_loss", "held_bytes_counted"):
        assert again[key] == metrics[key] > 0, key


def run_and_die(config, directory):
    """Rank 1 is killed in its second step."""
    with distributed(device="cpu") as ctx:
        context = RunContext(ctx, 0, Path(directory))
        if ctx.rank == 1:
            original = dist.all_gather_into_tensor
            calls = []

            def counted(*args, **kwargs):
                calls.append(1)
                if len(calls) > 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            dist.all_gather_into_tensor = counted
            if hasattr(dist, "all_gather_single"):
                dist.all_gather_single = counted
        return LAB.run(config, context)


def test_a_rank_killed_in_the_middle_is_named_in_seconds(tmp_path):
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 was killed by signal 9"):
        launch(run_and_die, world_size=2, args=(SMALL, str(tmp_path)))
    assert time.monotonic() - begin < 20


def test_the_command_line_runs_and_resumes(tmp_path):
    command = [sys.executable, "-m", "labs", "run", "baseline", "--out", str(tmp_path)]
    options = ["--set", "steps=2", "--set", "save_every=1", "--set", "batch_size=4"]
    done = subprocess.run([*command, "--scale", "ranks", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (tmp_path / "baseline").iterdir()
    assert {"record.json", "report.html", "request.json", "state.pt"} <= {p.name for p in directory.iterdir()}
    again = subprocess.run([*command, "--resume", "latest"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr


def test_torchrun_runs_the_same_lab(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labs.baseline.run", "--scale", "ranks", "--out", str(tmp_path), "--set", "steps=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "baseline" / "ranks-world2" / "record.json").exists()


@pytest.mark.parametrize("scale", ["toy", "ranks", "gpu", "cluster"])
def test_every_scale_is_a_valid_configuration(scale):
    config, settings = load_scale(LAB, scale)
    assert config.steps > 0 and settings.world_size >= 1


@pytest.mark.parametrize(
    "change", [{"lr": 0.0}, {"steps": 0}, {"seq_len": -1}, {"weight_decay": -0.1}, {"save_every": -1}], ids=str
)
def test_wrong_settings_are_refused_with_their_value(change):
    (name, value) = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name} = {value} must be (above|at least) "):
        dataclasses.replace(load_scale(LAB, "toy")[0], **change)
