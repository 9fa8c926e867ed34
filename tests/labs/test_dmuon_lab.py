"""The lab of owner-sharded Muon: equal to its twin, counted, resumable, drawn, its exercises graded."""

import dataclasses
import subprocess
import sys
from functools import partial

import pytest

from dist_lib.comm import RankError, distributed, launch
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.events import Event
from dist_lib.dmuon.workloads import workload
from labs import grading
from labs.dmuon.holdings import WAYS, holdings, holdings_figure, moments
from labs.dmuon.plots import figures, one_step, recorded_events, timeline_figure
from labs.dmuon.run import LAB, Config
from labs.dmuon.shares import kernel_shares, stages
from labs.framework import SCALES, RunContext, load_scale
from tests.labs import runs

SMALL = Config(
    model="tiny-0.3m",
    steps=3,
    batch_size=4,
    seq_len=16,
    lr=0.01,
    adamw_lr=0.01,
    compared=("replicated", "gather", "all-to-all", "adamw"),
    save_every=2,
)
MUONS = ("dmuon", "replicated", "gather", "all_to_all")


trained = partial(runs.trained, "dmuon")


def losses(rows):
    """Rows of training steps, without the recorded times."""
    return [row for row in rows if "event_rank" not in row]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return launch(runs.trained, world_size=2, args=("dmuon", SMALL, str(tmp_path_factory.mktemp("pair"))))


def test_every_way_equals_the_single_process_and_its_byte_formula(pair):
    found, other = pair[0][0], pair[1][0]
    for name in MUONS:
        assert found[f"{name}_tensors_equal_to_twin"] == "29 of 29", name
        assert found[f"{name}_ranks_with_bytes_of_the_formula"] == "2 of 2", name
        assert found[f"{name}_validation_loss"] == found["dmuon_validation_loss"]
    assert found["adamw_ranks_with_bytes_of_the_formula"] == "2 of 2"
    assert found["adamw_validation_loss"] != found["dmuon_validation_loss"]
    assert found["ranks_with_momentum_bytes_as_planned"] == "2 of 2"
    assert other == {k: v for k, v in found.items() if not k.endswith("twin")}  # the twin is trained on rank 0 alone


def test_orthogonalisations_are_counted(pair):
    times = {name: pair[0][0][f"{name}_times_orthogonalised_a_step"] for name in MUONS}
    assert times == {"dmuon": "1", "replicated": "2", "gather": "2", "all_to_all": "1"}


def test_the_recorded_step_names_every_owner(pair):
    events = recorded_events(pair[0][1])
    assert pair[1][1] == []  # only rank 0 keeps rows
    step = one_step(events)
    assert {e.rank for e in step} == {0, 1} and min(e.start for e in step) == 0
    assert {e.rank for e in step if e.kind == "orthogonalise"} == {0, 1}
    assert {e.layer for e in step if e.kind == "publish"} == {"layers.0", "layers.1", "layers.2", "rest"}
    reduced = sum(e.bytes for e in step if e.kind == "reduce" and e.layer != "rest" and e.rank == 0)
    assert reduced == 4 * 304_128  # each matrix's gradient once, float32
    fig = timeline_figure(step)
    assert [c["values"] for c in fig.layout.meta["controls"]] == [["all", "layers.0", "layers.1", "layers.2"]]
    with pytest.raises(ValueError, match="no events"):
        timeline_figure([])


def test_a_step_is_cut_out_of_the_record():
    spans = [("forward", 0.0, 1.0), ("publish", 2.0, 4.5), ("forward", 4.0, 5.0), ("backward", 5.0, 6.0)]
    events = [Event(0, kind, "layers.0", 8, a, b) for kind, a, b in spans]
    assert [(e.kind, e.start) for e in one_step(events)] == [("publish", 0.0), ("forward", 2.0), ("backward", 3.0)]


def test_weights_on_their_owners_alone_learn_the_same(tmp_path, pair):
    config = dataclasses.replace(SMALL, mode="fsdp-free", ordered=False, compared=())
    found = launch(runs.trained, world_size=2, args=("dmuon", config, str(tmp_path)))[0][0]
    assert found["dmuon_tensors_equal_to_twin"] == "29 of 29"
    assert found["dmuon_ranks_with_bytes_of_the_formula"] == "2 of 2"
    assert found["dmuon_validation_loss"] == pair[0][0]["dmuon_validation_loss"]


def test_one_message_an_owner_has_the_same_bits(tmp_path, pair):
    config = dataclasses.replace(SMALL, packs="model", compared=())
    found = launch(runs.trained, world_size=2, args=("dmuon", config, str(tmp_path)))[0][0]
    assert found["dmuon_tensors_equal_to_twin"] == "29 of 29"
    assert found["dmuon_ranks_with_bytes_of_the_formula"] == "2 of 2"
    assert found["dmuon_validation_loss"] == pair[0][0]["dmuon_validation_loss"]


def test_replicas_of_shards_learn_the_same(tmp_path):
    """Four ranks, two replicas: sums go in another order than a single process's, so weights agree to rounding."""
    config = dataclasses.replace(SMALL, mode="hsdp-keep", ordered=False, compared=(), batch_size=4)
    found = launch(runs.trained, world_size=4, args=("dmuon", config, str(tmp_path / "a")), timeout_s=60)[0][0]
    twin = dataclasses.replace(SMALL, compared=(), batch_size=4)
    alone = trained(twin, tmp_path / "b")[0]
    assert found["dmuon_ranks_with_bytes_of_the_formula"] == "4 of 4"
    assert found["dmuon_times_orthogonalised_a_step"] == "1"
    assert found["dmuon_validation_loss"] == pytest.approx(alone["dmuon_validation_loss"], abs=1e-4)
    wrong = dataclasses.replace(config, shards=3)
    with pytest.raises(RankError, match="shards = 3 must divide the 4 ranks"):
        launch(runs.trained, world_size=4, args=("dmuon", wrong, str(tmp_path / "c")), timeout_s=60)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    config = dataclasses.replace(SMALL, compared=("adamw",))
    whole, rows = trained(config, tmp_path)
    state = tmp_path / "state.pt"
    assert (tmp_path / "owners" / "step-0000000002").exists()

    class Stopped(Exception):
        pass

    def stop(row):
        if row["step"] == 3:
            raise Stopped

    other = tmp_path / "other"
    with distributed(device="cpu") as ctx, pytest.raises(Stopped):
        LAB.run(config, RunContext(ctx, 0, other, False, stop))
    found, again = trained(config, other, resumed=True)
    assert losses(again) == losses(rows) and len(losses(rows)) == 6
    assert found == whole and state.exists()


def test_a_run_ends_with_a_record_and_figures(tmp_path):
    record, steps = runs.finished(
        "dmuon", ["steps=2", "batch_size=4", "seq_len=16", "twin=false", "compared=[]"], tmp_path
    )
    assert [s["step"] for s in steps] == [1, 2] and steps[0]["total"] == 2
    curves, bars, drawn = figures(record)
    assert [len(t.y) for t in curves.data] == [2] and len(bars.data) == 1 and drawn.data
    assert "dmuon_tensors_equal_to_twin" not in record.metrics


def test_torchrun_runs_the_same_lab(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labs.dmuon.run", "--scale", "ranks", "--out", str(tmp_path)]
    command += ["--set", "steps=2", "--set", "batch_size=4", "--set", "twin=false", "--set", "compared=[]"]
    done = subprocess.run(command, cwd=grading.ROOT.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "dmuon" / "ranks-world2" / "record.json").exists()


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_a_valid_configuration(scale):
    config, settings = load_scale(LAB, scale)
    assert config.batch_size % settings.world_size == 0


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"lr": 0.0},
        {"save_every": -1},
        {"mode": "tp"},
        {"publish": "later"},
        {"owners": "best"},
        {"compared": ("sgd",)},
        {"compared": ("gather", "gather")},
        {"ordered": True, "mode": "fsdp-keep"},
        {"packs": "model", "mode": "fsdp-keep", "ordered": False},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(SMALL, **change)


def test_a_batch_that_the_ranks_do_not_divide_is_refused(tmp_path):
    from dist_lib.comm import RankError

    with pytest.raises(RankError, match="batch_size = 3 must be a multiple of the 2 ranks"):
        launch(runs.trained, world_size=2, args=("dmuon", dataclasses.replace(SMALL, batch_size=3), str(tmp_path)))


def test_what_ranks_hold_follows_the_plan():
    plan = make_plan(workload("tiny-0.3m"), 3)
    names, owned = {m.name for m in plan.matrices}, {(plan.owner(m.name), m.name) for m in plan.matrices}
    everyone, kept, fetched = WAYS
    rest, forward, backward, update = moments(plan)
    assert holdings(plan, everyone, update)["work"] == {(r, n) for r in range(3) for n in names}
    for way in (kept, fetched):
        found = holdings(plan, way, update)
        assert found["work"] == found["momentum"] == found["gradient"] == owned
    assert holdings(plan, fetched, rest)["weight"] == owned
    at_work = {n for r, n in holdings(plan, fetched, forward)["weight"] - owned}
    assert {n.split(".")[1] for n in at_work} == {"1", "2"}  # the layer and the next one
    gradients = holdings(plan, kept, backward)["gradient"]
    assert {n.split(".")[1] for _, n in gradients} == {"1", "2"}
    assert {(r, n) for r, n in gradients if n.startswith("layers.2.")} == {
        (r, n) for r, n in owned if n.startswith("layers.2.")
    }
    shown = [t for t in holdings_figure(plan).data if t.visible]
    assert [len(t.x) for t in shown] == [63] * 4
    with pytest.raises(ValueError, match="moments"):
        holdings(plan, kept, "never")


def test_shares_of_the_gain_depend_on_the_order():
    found = stages("wallx", 128, gradient_bytes=4)
    assert found["neither"] > found["kernel"] > found["owners"] > found["both"]
    first, last = kernel_shares("wallx", 128, gradient_bytes=4)
    whole = found["neither"] - found["both"]
    owners_after = (found["kernel"] - found["both"]) / whole
    assert first + owners_after == pytest.approx(1) and 0 < last < first
