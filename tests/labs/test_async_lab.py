"""The lab of the asynchronous pipeline: equal to its twin, resumable, drawn, its exercises graded."""

import dataclasses
import subprocess
import sys
from functools import partial

import pytest

from dist_lib.comm import launch
from labs import grading
from labs.async_pipeline.plots import figures, recorded_events
from labs.async_pipeline.run import LAB, Config
from labs.framework import SCALES, load_scale
from tests.labs import runs

SMALL = Config(
    model="tiny-0.3m",
    steps=4,
    batch_size=4,
    seq_len=16,
    seeds=1,
    micro_batches=2,
    adamw_lr=0.01,
    muon_lr=0.01,
    drain_every=2,
    save_every=2,
)


trained = partial(runs.trained, "async_pipeline")


def losses(rows):
    """Rows of training steps, without the recorded times."""
    return [row for row in rows if "event_stage" not in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(SMALL, tmp_path_factory.mktemp("alone"))


def test_two_stages_equal_their_twin_and_are_close_to_one_stage(tmp_path, alone):
    config = dataclasses.replace(SMALL, twin=True)
    ranks = launch(runs.trained, world_size=2, args=("async_pipeline", config, str(tmp_path / "ranks")))
    one = alone[0]  # adds the gradients of the tied embedding, and the squares of the norm, in another order
    for found, _ in ranks:
        assert found["adamw_tensors_equal_to_twin"] == found["muon_tensors_equal_to_twin"] == "29 of 29"
        assert found["stages"] == 2
        assert all(found[k] == pytest.approx(one[k], rel=1e-4) for k in one if k.endswith("validation_loss"))


def test_replicas_learn_the_same_as_one_pipeline(tmp_path, alone):
    config = dataclasses.replace(SMALL, replicas=2, micro_batches=1, save_every=0)
    ranks = launch(runs.trained, world_size=2, args=("async_pipeline", config, str(tmp_path)))
    for name in (k for k in alone[0] if k.endswith("validation_loss")):
        assert ranks[0][0][name] == ranks[1][0][name] == pytest.approx(alone[0][name], rel=1e-4)


def test_a_resumed_run_has_the_same_bits(tmp_path, alone):
    trained(SMALL, tmp_path)
    for part in ("muon-sync-0", "muon-delay-0", "muon-feedback-0"):
        last = tmp_path / part / "checkpoints" / "step-00000004"
        for file in last.iterdir():
            file.unlink()
        last.rmdir()  # as if the run had ended in the middle of its second half
    found, rows = trained(SMALL, tmp_path, resumed=True)
    assert losses(rows) == losses(alone[1]) and len(losses(rows)) == 4 * 6
    same = [k for k in found if "validation" in k or "gap" in k]
    assert {k: found[k] for k in same} == {k: alone[0][k] for k in same}


def test_the_three_ways_start_alike_and_then_differ(alone):
    by_name = {}
    for row in losses(alone[1]):
        name = next(k for k in row if k.startswith(("adamw", "muon")))
        by_name.setdefault(name, []).append(row[name])
    for optimizer in ("adamw", "muon"):
        sync, delay, feedback = (by_name[f"{optimizer} {v}"] for v in ("sync", "delay", "feedback"))
        assert sync[0] == delay[0] == feedback[0]
        assert delay[1] == feedback[1] != sync[1]  # batch 1 still runs on the first weights
        assert delay[2] == feedback[2]  # the first update is not corrected
        assert delay[3] != feedback[3]


def test_a_run_ends_with_a_record_and_figures(tmp_path):
    record, steps = runs.finished("async_pipeline", ["steps=2", "batch_size=4", "seq_len=16", "twin=false"], tmp_path)
    assert [s["step"] for s in steps] == list(range(1, 13)) and steps[0]["total"] == 12
    events = recorded_events(record.history)
    assert len(events) == 2 * (2 * 2 * 4 + 2)  # two stages, two batches of four forwards and backwards, two updates
    assert {e.action.version for e in events if e.action.kind == "forward"} == {0}
    curves, gaps, drawn = figures(record)
    assert [len(t.y) for t in curves.data] == [2] * 6 and len(gaps.data) == 2 and drawn.data


def test_torchrun_runs_the_same_lab(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labs.async_pipeline.run", "--scale", "ranks", "--out", str(tmp_path)]
    command += ["--set", "steps=2", "--set", "batch_size=4", "--set", "twin=false"]
    done = subprocess.run(command, cwd=grading.ROOT.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "async_pipeline" / "ranks-world2" / "record.json").exists()


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_a_valid_configuration(scale):
    config, settings = load_scale(LAB, scale)
    stages = settings.world_size // config.replicas
    assert stages >= 1 and config.micro_batches >= stages


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"micro_batches": 3}, {"adamw_lr": 0.0}, {"clip_norm": -1.0}, {"twin": True, "replicas": 2}],
    ids=str,
)
def test_wrong_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(SMALL, **change)


def test_too_few_micro_batches_are_refused_on_every_rank(tmp_path):
    from dist_lib.comm import RankError

    with pytest.raises(RankError, match="micro_batches = 1 with 2 stages"):
        launch(
            runs.trained,
            world_size=2,
            args=("async_pipeline", dataclasses.replace(SMALL, micro_batches=1), str(tmp_path)),
        )
