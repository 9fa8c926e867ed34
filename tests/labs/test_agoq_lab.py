"""The lab of quantised activations and gradients: counted against formulas, resumable, drawn."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from dist_lib.agoq import ActivationPlan
from dist_lib.comm import RankError, distributed, launch
from dist_lib.models import Decoder, SavedTensorCounter, get_config
from labs import grading
from labs.agoq import formulas, methods
from labs.agoq.plots import figures, mean_curve
from labs.agoq.run import LAB, Config
from labs.framework import SCALES, LabError, RunContext, load_scale
from tests.labs import runs

SMALL = Config(
    model="tiny-0.3m",
    steps=3,
    batch_size=4,
    seq_len=16,
    lr=0.01,
    block_size=32,
    min_elements=1000,
    schemes=("layers",),
    warmup=1,
    save_every=2,
)


trained = partial(runs.trained, "agoq")


class Stopped(Exception):
    """Ends a run between two steps."""


def stopped(config, directory, at):
    """Run the lab up to a step, in which every rank stops."""
    with distributed(device="cpu") as ctx:
        context = RunContext(ctx, 0, Path(directory), False)
        log = context.log_step

        def stop(step, total, **metrics):
            if step == at:
                raise Stopped
            log(step, total, **metrics)

        context.log_step = stop
        with pytest.raises(Stopped):
            LAB.run(config, context)


def both_ways(directory):
    """On one rank: replicated weights with every method, sharded ones, and sharded ones that stop and go on."""
    sharded = dataclasses.replace(SMALL, parallel="fsdp")
    shorter = dataclasses.replace(sharded, compared=("all",))
    stopped(shorter, f"{directory}/c", 6)
    runs = (SMALL, "a", False), (sharded, "b", False), (shorter, "c", True)
    return [trained(config, f"{directory}/{folder}", resumed) for config, folder, resumed in runs]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return launch(both_ways, world_size=2, args=(str(tmp_path_factory.mktemp("pair")),), timeout_s=120)


def test_what_is_held_and_sent_is_what_the_formulas_say(pair):
    found = pair[0][0][0]
    assert found["wrong"] == "nothing" and found["held_bytes_off_the_formula"] == 0.0
    assert found["wire_bytes_equal_to_the_formula"] == "10 of 10"
    for what in ("gradients", "state"):
        assert found[f"{what}_bytes_equal_to_the_formula"] == "5 of 5"
    assert found["methods_with_equal_weights_on_all_ranks"] == "5 of 5"
    assert found["first_losses_with_the_bits_of_the_baseline"] == "4 of 4"
    assert 3.8 < found["baseline_bytes_sent_a_step"] / found["gradients_bytes_sent_a_step"] < 3.94
    assert pair[1][0][0] == found  # the same numbers on the other rank, which logs nothing
    assert pair[1][0][1] == []


def test_each_piece_changes_its_own_bytes_and_the_gradient_a_little(pair):
    found = pair[0][0][0]
    kinds = {
        "activations": "bytes_held_for_backward",
        "gradients": "gradient_bytes",
        "optimizer": "optimizer_state_bytes",
    }
    for piece, kind in kinds.items():
        for name in kinds:
            same = found[f"{name}_{kind}"] == found[f"baseline_{kind}"]
            assert same == (name != piece), (name, kind)
        assert found[f"all_{kind}"] == found[f"{piece}_{kind}"] < 0.5 * found[f"baseline_{kind}"]
    errors = {n: found[f"{n}_gradient_error"] for n in ("activations", "gradients", "all", "layers")}
    assert all(0.001 < e < 0.2 for e in errors.values()) and errors["gradients"] < errors["activations"]
    assert "optimizer_gradient_error" not in found


def test_sharded_weights_learn_the_same_and_send_what_the_formula_says(pair):
    (whole, rows), (found, sharded), _ = pair[0]
    assert found["wrong"] == "nothing" and found["wire_bytes_equal_to_the_formula"] == "10 of 10"
    assert found["baseline_validation_loss"] == pytest.approx(whole["baseline_validation_loss"], rel=1e-4)
    assert found["baseline_gradient_bytes"] * 2 == whole["baseline_gradient_bytes"]
    assert 3.8 < found["baseline_bytes_sent_a_step"] / found["all_bytes_sent_a_step"] < 3.94
    assert sharded[0]["baseline"] == pytest.approx(rows[0]["baseline"], rel=1e-6)


def test_sharded_weights_go_on_with_the_same_bits(pair):
    for _, (whole, _), (resumed, _) in pair:
        for name in ("baseline", "all"):
            assert resumed[f"{name}_validation_loss"] == whole[f"{name}_validation_loss"]
        assert resumed["wrong"] == "nothing"
    assert [r["step"] for r in pair[0][2][1]] == [1, 2, 3, 4, 5, 6]


def failing(config, directory):
    """What the run says is wrong."""
    return trained(config, directory)[0]["wrong"]


def test_a_piece_that_is_not_there_is_named(tmp_path, monkeypatch):
    config = dataclasses.replace(SMALL, steps=1, schemes=())
    monkeypatch.setattr(methods, "quantize_activations", lambda model, plan: model)
    assert failing(config, tmp_path / "a") == "activations held, all held"
    monkeypatch.undo()
    make = methods.make_optimizer
    monkeypatch.setattr(methods, "make_optimizer", lambda m, c, eight_bits: make(m, c, eight_bits=False))
    assert failing(config, tmp_path / "b") == "optimizer state, all state"


@pytest.mark.parametrize("layout", ["shared", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 4])
def test_held_bytes_follow_from_shapes(layout, dtype, heads):
    config = dataclasses.replace(get_config("tiny-0.3m"), n_layers=2, n_kv_heads=heads)
    tokens, targets = (torch.randint(0, 256, (2, 24)) for _ in range(2))
    plan = ActivationPlan("int5", 64, layout=layout)
    for encoded in (None, plan):
        model = Decoder(config).to(dtype)
        if encoded is not None:
            methods.quantize_activations(model, encoded)
        with SavedTensorCounter(model) as counter:
            model.loss(tokens, targets)
        assert counter.bytes == formulas.held_bytes(config, 2, 24, encoded, dtype.itemsize)


def test_a_million_gradients_on_the_wire():
    form = SMALL.form()
    sizes = [2**20]
    assert formulas.payload_bytes(sizes, form, 0, 2) == 3 * form.message_bytes(2**19)
    assert formulas.sent_bytes(sizes, form, 0, 2) == 1_064_960  # 2 (W-1)/W N (1 + 4/256)
    assert formulas.sent_bytes(sizes, form, 0, 4) == 1_597_440
    assert formulas.sent_bytes(sizes, None, 0, 2) == 4 * 2**20
    assert formulas.payload_bytes(sizes, form, 0, 1) == formulas.sent_bytes(sizes, None, 0, 1) == 0


def test_a_resumed_run_has_the_same_bits(tmp_path):
    config = dataclasses.replace(SMALL, compared=("all",), schemes=())
    whole, rows = trained(config, tmp_path)

    for at in (3, 6):  # in the baseline, after its state of step 2; in the method with all pieces
        other = tmp_path / str(at)

        stopped(config, other, at)
        found, again = trained(config, other, resumed=True)
        assert found == whole and again == rows and len(rows) == 6


def test_a_run_ends_with_a_record_and_figures(tmp_path):
    changes = ["steps=2", "batch_size=4", "seq_len=16", "compared=['gradients']", "schemes=['attention']"]
    record, steps = runs.finished("agoq", changes, tmp_path)
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    memory, errors, wire, losses = figures(record)
    assert list(memory.data[0].x) == ["nothing", "gradients"] and len(memory.data) == 4
    assert errors.data[0].x[1] == "queries,<br>keys, values"
    assert list(errors.data[1].y) == [record.metrics[f"{n}_gradient_error"] for n in ("gradients", "attention")]
    assert wire.data[0].y[1] * 1e6 == pytest.approx(record.metrics["gradients_bytes_sent_a_step"])
    assert [len(t.y) for t in losses.data] == [2, 2]
    assert mean_curve(record, "baseline")[1] == pytest.approx((steps[0]["baseline"] + steps[1]["baseline"]) / 2)


def test_torchrun_runs_the_same_lab(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labs.agoq.run", "--scale", "ranks", "--out", str(tmp_path)]
    command += ["--set", "steps=2", "--set", "batch_size=4", "--set", "compared=['all']", "--set", "schemes=[]"]
    done = subprocess.run(command, cwd=grading.ROOT.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "agoq" / "ranks-world2" / "record.json").exists()


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_a_valid_configuration(scale):
    config, settings = load_scale(LAB, scale)
    assert config.batch_size % (settings.world_size * config.micro_batches) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"micro_batches": 0},
        {"lr": 0.0},
        {"save_every": -1},
        {"parallel": "tp"},
        {"dtype": "float16"},
        {"compared": ("sgd",)},
        {"compared": ("all", "all")},
        {"schemes": ("everything",)},
        {"codec": "fp3"},
        {"layout": "other"},
        {"gradient_codec": "fp4"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change)).removeprefix("gradient_")):
        dataclasses.replace(SMALL, **change)


def test_a_batch_that_the_ranks_do_not_divide_is_refused(tmp_path):
    with pytest.raises(RankError, match="batch_size = 6 must be a multiple of ranks x micro_batches = 4"):
        launch(runs.trained, world_size=2, args=("agoq", dataclasses.replace(SMALL, batch_size=6), str(tmp_path)))


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(LabError, match=r"dist-lib\[agoq\].*leave them out of compared"):
        methods.make_optimizer([torch.nn.Parameter(torch.ones(2))], SMALL, eight_bits=True)
