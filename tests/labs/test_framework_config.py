"""Configuration, state and records of the labs, with a lab made for the test."""

import json
import sys
import textwrap

import pytest
import torch

from dist_lib import results
from dist_lib.comm import RankError, distributed
from labs import framework, running
from labs.framework import LabError, RunContext, RunSettings, load_scale, parse_setting

SOURCE = textwrap.dedent(
    """
    from dataclasses import dataclass

    import torch

    from dist_lib.comm import collectives
    from labs.framework import Lab


    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int
        rate: float
        fail_at: int = -1
        sizes: tuple[int, ...] = (1, 2)
        name: str = "a"
        fast: bool = False

        def __post_init__(self):
            if self.steps < 1:
                raise ValueError(f"steps = {self.steps}: at least 1")


    def run(config, context):
        state = context.load_state() or {"step": 0, "total": 0.0}
        total = state["total"]
        for step in range(state["step"], config.steps):
            if step == config.fail_at and context.dist.rank == context.dist.world_size - 1:
                raise KeyboardInterrupt if context.dist.world_size == 1 else ValueError("planted fault")
            value = collectives.all_reduce(torch.ones(1), op="sum")
            total += config.rate * value.item()
            context.log_step(step + 1, config.steps, amount=total)
            context.save_state({"step": step + 1, "total": total})
        return {"total": total, "was_resumed": context.resumed}


    LAB = Lab("probe", "A probe", Config, run)
    """
)
TOML = "steps = 4\nrate = 0.5\n[run]\nworld_size = 1\nminutes = 0.1\n"


@pytest.fixture
def probe(tmp_path, monkeypatch):
    (tmp_path / "labs" / "probe" / "configs").mkdir(parents=True)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "probe_lab_of_a_test.py").write_text(SOURCE)
    for scale in framework.SCALES:
        (tmp_path / "labs" / "probe" / "configs" / f"{scale}.toml").write_text(TOML)
    monkeypatch.setattr(framework, "ROOT", tmp_path / "labs")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    sys.modules.pop("probe_lab_of_a_test", None)
    import probe_lab_of_a_test

    yield probe_lab_of_a_test.LAB
    sys.modules.pop("probe_lab_of_a_test", None)


def request_for(lab, directory, *, resumed=False, scale="toy", overrides=()):
    config, settings = load_scale(lab, scale, overrides)
    made = running.Request(
        lab=lab.name,
        module="probe_lab_of_a_test",
        scale=scale,
        config=config,
        seed=3,
        directory=str(directory),
        resumed=resumed,
    )
    return made, settings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=3", ["stepz", "did you mean 'steps'"]),
        ("steps=many", ["steps", "many", "int"]),
        ("steps=1.5", ["steps", "1.5", "int"]),
        ("steps=true", ["steps", "True", "int"]),
        ("rate=true", ["rate", "float"]),
        ("fast=1", ["fast", "bool"]),
        ("name=3", ["name", "str"]),
        ("sizes=3", ["sizes", "tuple"]),
        ("steps=0", ["steps = 0", "at least 1"]),
        ("run.world_sise=2", ["world_sise", "did you mean 'world_size'"]),
        ("steps", ["key=value"]),
        ("=3", ["key=value"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(probe, override, words):
    with pytest.raises(LabError) as caught:
        load_scale(probe, "toy", [override])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_settings_from_the_command_line_win_and_keep_their_types(probe):
    overrides = ["steps=9", "rate=2", "sizes=[4, 5]", "fast=true", "name=b", "run.world_size=2"]
    config, settings = load_scale(probe, "toy", overrides)
    assert (config.steps, config.rate, config.sizes, config.fast, config.name) == (9, 2.0, (4, 5), True, "b")
    assert isinstance(config.rate, float)
    assert settings == RunSettings(world_size=2, minutes=0.1)


def test_a_missing_entry_and_an_unknown_scale_are_named(probe, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("steps = 3\n")
    with pytest.raises(LabError, match="no value for rate"):
        load_scale(probe, str(own))
    with pytest.raises(LabError, match=r"no scale 'tiny'.*toy, ranks, gpu, cluster"):
        load_scale(probe, "tiny")
    own.write_text("steps = = 3\n")
    with pytest.raises(LabError, match="not valid TOML"):
        load_scale(probe, str(own))


@pytest.mark.parametrize(("text", "value"), [("a=3", 3), ("a=1e-3", 1e-3), ("a=x y", "x y"), ("a=b=c", "b=c")])
def test_values_on_the_command_line_are_toml_or_text(text, value):
    assert parse_setting(text) == ("a", value)


def test_one_process_writes_a_complete_record(probe, tmp_path):
    seen = []
    request, settings = request_for(probe, tmp_path / "run")
    record = running.execute(request, settings, on_step=seen.append)
    stored = results.load(tmp_path / "run")
    assert stored == results.RunRecord(**json.loads((tmp_path / "run" / "record.json").read_text()))
    assert record.metrics == stored.metrics == {"total": 2.0, "was_resumed": False}
    assert [row["step"] for row in stored.history] == [1, 2, 3, 4]
    assert [(row["step"], row["total"]) for row in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (stored.status, stored.world_size, stored.seed, stored.config["steps"]) == ("finished", 1, 3, 4)
    assert stored.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert stored.hardware["cores"] >= 1 and stored.peak_memory_bytes > 2**20 and stored.timings["total"] > 0


def test_several_ranks_give_the_record_of_rank_0(probe, tmp_path):
    request, settings = request_for(probe, tmp_path / "run", overrides=["run.world_size=2"])
    steps = []
    record = running.execute(request, settings, on_step=steps.append)
    assert record.metrics["total"] == 4.0  # two ranks add 0.5 each, four times
    assert record.world_size == 2 and [row["step"] for row in steps] == [1, 2, 3, 4]


def test_an_interrupted_run_resumes_where_it_stood(probe, tmp_path):
    request, settings = request_for(probe, tmp_path / "run", overrides=["fail_at=2"])
    running.write_request(request, settings)
    with pytest.raises(KeyboardInterrupt):
        running.execute(request, settings)
    assert results.load(tmp_path / "run").status == "interrupted"
    again, settings = running.read_request(tmp_path / "run", probe)
    assert again.resumed and again.seed == 3
    again = running.Request(**{**vars(again), "config": load_scale(probe, "toy")[0]})
    record = running.execute(again, settings)
    assert record.metrics == {"total": 2.0, "was_resumed": True}
    assert [row["step"] for row in record.history] == [1, 2, 3, 4]  # two from before, two from now


def test_a_failing_rank_leaves_a_record_that_says_so(probe, tmp_path):
    request, settings = request_for(probe, tmp_path / "run", overrides=["fail_at=1", "run.world_size=2"])
    with pytest.raises(RankError, match="planted fault"):
        running.execute(request, settings)
    assert results.load(tmp_path / "run").status == "failed"


def test_state_is_whole_or_the_old_one(tmp_path, monkeypatch):
    with distributed(device="cpu") as ctx:
        context = RunContext(ctx, 0, tmp_path)
        context.save_state({"step": 1})

        def broken(value, file):
            file.write_bytes(b"half")
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", broken)
            with pytest.raises(OSError, match="disk full"):
                context.save_state({"step": 2})
        assert RunContext(ctx, 0, tmp_path, resumed=True).load_state() == {"step": 1}
        assert RunContext(ctx, 0, tmp_path).load_state() is None
        (tmp_path / framework.STATE).write_bytes(b"damaged")
        with pytest.raises(LabError, match="without --resume"):
            RunContext(ctx, 0, tmp_path, resumed=True).load_state()
        with pytest.raises(LabError, match="nothing to resume"):
            RunContext(ctx, 0, tmp_path / "none", resumed=True).load_state()


def test_a_run_never_takes_the_folder_of_another(tmp_path):
    first = running.run_directory("probe", "toy", tmp_path)
    first.mkdir(parents=True)
    assert running.run_directory("probe", "toy", tmp_path) != first


def test_an_unknown_run_is_named(tmp_path):
    with pytest.raises(LabError, match="no run under"):
        running.find_run("probe", "latest", tmp_path)
    with pytest.raises(LabError, match=r"request\.json"):
        running.find_run("probe", str(tmp_path), tmp_path)
