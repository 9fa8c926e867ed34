"""The Muon lab: equal to its twin, counted, resumable; its sweep recorded; its exercises graded."""

import dataclasses
import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from dist_lib.comm import launch
from dist_lib.models import Decoder, get_config
from dist_lib.tasks import BatchSampler, load_corpus
from labs import grading
from labs.bench import find_rows
from labs.framework import SCALES, load_scale
from labs.muon import spectra
from labs.muon.run import LAB, Config, Outcome, figures, mean_curve, metrics
from labs.muon.sweep import RECORD, sweep
from tests.labs import runs

SMALL = Config(model="tiny-0.3m", steps=2, batch_size=4, seq_len=16, seeds=1, muon_lr=0.01, adamw_lr=0.01, save_every=1)


trained = partial(runs.trained, "muon")


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_their_twin_bit_for_bit_and_bytes_are_counted(world_size, tmp_path):
    ranks = launch(runs.trained, world_size=world_size, args=("muon", SMALL, str(tmp_path / "ranks")))
    rows = ranks[0][1]
    twin, twin_rows = trained(dataclasses.replace(SMALL, shards=world_size), tmp_path / "twin")
    assert rows == twin_rows
    for name in ("muon_validation_loss", "adamw_validation_loss"):
        assert all(r[0][name] == twin[name] for r in ranks)
    for r, _ in ranks:
        assert r["payload_bytes_counted"] == r["payload_bytes_predicted"] == 4 * (r["parameters"] + 1)
        assert r["orthogonalised_counted"] == r["orthogonalised_predicted"] == 2 * 21
    assert twin["payload_bytes_counted"] == twin["payload_bytes_predicted"] == 0


def test_a_resumed_run_has_the_same_bits(tmp_path):
    config = dataclasses.replace(SMALL, seeds=2)
    found, rows = trained(config, tmp_path / "full")
    trained(config, tmp_path / "cut")
    for part in ("adamw-1", "muon-1"):  # as if the run had ended within the first seed's second training
        for file in (tmp_path / "cut" / part).iterdir():
            file.unlink()
    again, again_rows = trained(config, tmp_path / "cut", resumed=True)
    assert again_rows == rows and len(rows) == 2 * 2 * 2
    same = [k for k in found if "validation" in k or k.startswith("muon_gain")]
    assert {k: found[k] for k in same} == {k: again[k] for k in same}


def test_both_optimizers_see_the_same_start_and_batches(tmp_path):
    _, rows = trained(dataclasses.replace(SMALL, steps=1), tmp_path)
    assert rows[0]["adamw"] == rows[1]["muon"]
    _, rows = trained(SMALL, tmp_path)
    assert rows[1]["adamw"] != rows[3]["muon"]


def test_metrics_say_gain_spread_and_steps():
    config = dataclasses.replace(SMALL, steps=40, seeds=2)
    falling = [[4.0 - 0.05 * i for i in range(40)], [4.1 - 0.05 * i for i in range(40)]]
    fast = [[4.0 - 0.1 * i for i in range(40)], [4.1 - 0.1 * i for i in range(40)]]
    outcomes = {
        "adamw": [Outcome(c, v, 1.0, 40) for c, v in zip(falling, (2.0, 2.4), strict=True)],
        "muon": [Outcome(c, v, 2.0, 40, 40 * 21) for c, v in zip(fast, (1.9, 1.8), strict=True)],
    }
    found = metrics(config, 1, outcomes)
    assert found["muon_gain"] == pytest.approx(0.35) and found["muon_gain_least"] == pytest.approx(0.1)
    assert found["adamw_validation_spread"] == pytest.approx(0.4)
    assert found["muon_optimizer_ms_per_step"] == pytest.approx(50.0)
    step = found["muon_steps_to_adamw_loss"]
    goal, ours = mean_curve(outcomes["adamw"])[-1], mean_curve(outcomes["muon"])
    assert ours[step - 1] <= goal < ours[step - 2]
    outcomes["muon"] = [Outcome([9.0] * 40, 9.0, 1.0, 40)] * 2
    assert metrics(config, 1, outcomes)["muon_steps_to_adamw_loss"] == "not reached"


def test_a_run_ends_with_a_record_and_figures(tmp_path):
    record, steps = runs.finished("muon", ["steps=2", "batch_size=4", "seq_len=16"], tmp_path)
    assert len(record.history) == 4
    assert [s["step"] for s in steps] == [1, 2, 3, 4] and steps[0]["total"] == 4
    loss, bars = figures(record)
    assert [len(t.x) for t in loss.data] == [2, 2] and len(bars.data) == 2


def test_torchrun_runs_the_same_lab(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labs.muon.run", "--scale", "ranks", "--out", str(tmp_path)]
    command += ["--set", "steps=2", "--set", "batch_size=4"]
    done = subprocess.run(command, cwd=grading.ROOT.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "muon" / "ranks-world2" / "record.json").exists()


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_a_valid_configuration(scale):
    config, settings = load_scale(LAB, scale)
    assert config.steps > 0 and settings.world_size >= 1


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"muon_lr": 0.0}, {"adamw_lr": -1.0}, {"scale": "rms"}, {"shards": -1}], ids=str
)
def test_wrong_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(SMALL, **change)


def test_the_recorded_sweep_is_of_the_toy_scale_and_its_best_rates_are_used():
    record = json.loads(RECORD.read_text())
    config, _ = load_scale(LAB, "toy")
    swept = {k: v for k, v in record["config"].items() if not k.endswith("_lr")}
    assert swept == {k: v for k, v in dataclasses.asdict(config).items() if not k.endswith("_lr")}
    assert record["best"] == {"adamw": config.adamw_lr, "muon": config.muon_lr}
    for name, by_rate in record["validation_loss"].items():
        means = {float(rate): sum(v) / len(v) for rate, v in by_rate.items()}
        assert min(means, key=means.get) == record["best"][name]
        assert min(means) < record["best"][name] < max(means), "the best rate lies inside the sweep"
    assert not set(record["seeds"]) & {0, 1, 2}


def test_the_sweep_runs():
    found = sweep(dataclasses.replace(SMALL, steps=1), rates=(0.001, 0.01), seeds=(7,))
    assert set(found["validation_loss"]) == {"adamw", "muon"}
    assert len(found["validation_loss"]["muon"]["0.01"]) == 1 and found["best"]["muon"] in (0.001, 0.01)


def test_the_recorded_spectra_are_of_four_kinds_of_matrices_and_complete():
    record = json.loads(spectra.RECORD.read_text())
    assert list(record["spectra"]) == [f"layers.{spectra.LAYER}.{name}.weight" for name in spectra.MATRICES]
    assert len(record["loss"]) == record["settings"]["steps"] == 10
    assert {"command", "seed", "versions", "hardware", "model"} <= set(record)
    for values in record["spectra"].values():
        assert len(values) == get_config("smollm2-135m").d_model
        assert values == sorted(values, reverse=True) and values[-1] >= 0
        assert sum(v * v for v in values) == pytest.approx(1, abs=1e-3)


def test_spectra_of_the_small_decoder_are_those_of_a_written_out_recurrence():
    name, seed = "layers.0.self_attn.q_proj.weight", 3
    tokens = load_corpus().train[:2000]
    found = spectra.record(Decoder(get_config("tiny-0.3m"), seed=seed), tokens, [name], seed=seed, steps=2, lr=0.0)
    model = Decoder(get_config("tiny-0.3m"), seed=seed)  # a rate of zero: both gradients at the same weights
    gradients = []
    for step in range(2):
        model.zero_grad()
        model.loss(*BatchSampler(tokens, batch_size=4, seq_len=128, seed=seed).batch(step)).backward()
        gradients.append(model.get_parameter(name).grad.clone())
    wanted = torch.linalg.svdvals(0.95 * gradients[0] + gradients[1])
    torch.testing.assert_close(torch.tensor(found["spectra"][name]), wanted / wanted.norm(), rtol=2e-3, atol=1e-6)
    assert found["settings"] == {"steps": 2, "beta": 0.95, "lr": 0.0, "batch_size": 4, "seq_len": 128}


def test_the_bench_row_compares_the_same_step():
    (row,) = [row for _, row in find_rows("muon") if row.name == "muon-step"]
    pair = row.make()
    optimizers = [c.cell_contents for f in (pair.ours, pair.baseline) for c in f.__closure__ or ()]
    groups = [o.param_groups[0]["params"] for o in optimizers if isinstance(o, torch.optim.Optimizer)]
    assert len(groups) == 2 and [p.shape for p in groups[0]] == [p.shape for p in groups[1]] and len(groups[0]) == 7
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*groups, strict=True))
