"""The study of delayed gradients: its plan, its record and its report; and the effect itself, at 400 steps."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

from dist_lib.async_pipeline.error_feedback import ErrorFeedback
from dist_lib.models import Decoder
from labs.async_pipeline import study
from labs.async_pipeline.study_plan import MODES, SWEEP_RATES, Run, best_rates, make_optimizer, plan, sweep_runs
from labs.async_pipeline.study_report import Losses, report, verdicts

RATES = dict.fromkeys(SWEEP_RATES, 0.001)


def test_the_plan_names_each_run_once_within_a_group() -> None:
    groups = plan(RATES)
    for runs in groups.values():
        assert len({run.key for run in runs}) == len(runs)
        assert {run.mode for run in runs} <= set(MODES)
    everything = {run for runs in groups.values() for run in runs}
    assert len({run.key for run in everything}) == len(everything)
    assert {run.optimizer for run in plan({"adamw": 1e-3})["main"]} == {"adamw"}


def test_the_sweep_chooses_the_lowest_loss_and_waits_until_it_is_complete() -> None:
    runs = sweep_runs(["adamw"])
    losses: dict[str, float | None] = {run.key: 2.0 + abs(run.lr - 4e-3) for run in runs}
    assert best_rates(losses) == {"adamw": 4e-3}
    losses[runs[0].key] = None  # diverged
    assert best_rates(losses) == {"adamw": 4e-3}
    del losses[runs[0].key]
    assert best_rates(losses) == {}


def test_held_out_text_is_without_the_tables() -> None:
    corpus = study.load_corpus()
    text = bytes(study.held_out(corpus).tolist())
    assert b"uk_" not in text
    assert 600_000 < len(text) < 800_000
    assert b"uk_" not in bytes(corpus.train.tolist())  # so no model could know them


@pytest.mark.parametrize("name", list(SWEEP_RATES))
def test_optimizers_take_every_parameter_once_and_decay_matrices_only(name: str) -> None:
    model = Decoder(study.MODEL)
    run = Run(optimizer=name, lr=2e-3, steps=1, mode="sync", seed=0)
    optimizer = make_optimizer(run, list(model.named_parameters()))
    ErrorFeedback(optimizer)  # has momentum
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert rates == ({2e-3, 4e-3} if name in ("muon", "normuon") else {2e-3})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_momentum_and_modes_reach_the_trainer(name: str) -> None:
    base = Run(optimizer=name, lr=2e-3, steps=10, mode="delay", seed=0)
    for mode in MODES:
        trainer = study.make_trainer(dataclasses.replace(base, mode=mode), Decoder(study.MODEL))
        delays = tuple(trainer.config.delay_of(s) for s in range(len(trainer.optimizers)))
        expected: dict[str, tuple[int, ...]] = {"sync": (0,), "pipedream4": (3, 2, 1, 0), "pipedream16": (15, 10, 5, 0)}
        assert delays == expected.get(mode, (1,))
        assert isinstance(trainer.optimizers[0], ErrorFeedback) == (mode == "ef")
        assert trainer.sync_updates == (2 if mode == "sync_start" else 0)
    model = Decoder(study.MODEL)
    optimizer = make_optimizer(dataclasses.replace(base, momentum=0.7), list(model.named_parameters()))
    group = optimizer.param_groups[0]
    assert (group["betas"][0] if name == "adamw" else group["momentum"]) == 0.7
    with pytest.raises(ValueError, match="momentum is varied"):
        make_optimizer(dataclasses.replace(base, optimizer="lion", momentum=0.7), list(model.named_parameters()))
    with pytest.raises(ValueError, match="optimizer 'sgd'"):
        make_optimizer(dataclasses.replace(base, optimizer="sgd"), list(model.named_parameters()))


def record(losses: dict[tuple[str, str, int, int], float], **more: Any) -> dict[str, Any]:
    runs = {}
    for (optimizer, mode, steps, seed), loss in losses.items():
        run = Run(optimizer=optimizer, lr=4e-3, steps=steps, mode=mode, seed=seed)
        runs[run.key] = {**dataclasses.asdict(run), "loss": loss}
    return {"rates": {"adamw": 4e-3, "muon": 4e-3}, "runs": runs, **more}


GOOD = {
    ("adamw", "sync", 2000, 0): 1.6,
    ("adamw", "delay", 2000, 0): 1.8,
    ("adamw", "ef", 2000, 0): 1.62,
    ("muon", "sync", 2000, 0): 1.5,
    ("muon", "delay", 2000, 0): 1.52,
    ("muon", "ef", 2000, 0): 1.501,
}


def test_verdicts_say_what_holds_what_does_not_and_what_is_missing() -> None:
    found = {v.name: v for v in verdicts(record(GOOD))}
    assert found["R1"].holds and found["R2"].holds
    assert found["R3"].holds is None and "not run" in found["R3"].found
    bad = {v.name: v for v in verdicts(record({**GOOD, ("muon", "delay", 2000, 0): 1.56}))}
    assert bad["R1"].holds is False
    worse = {v.name: v for v in verdicts(record({**GOOD, ("adamw", "ef", 2000, 0): 1.7}))}
    assert worse["R2"].holds is False
    text = report(record({**GOOD, ("muon", "delay", 2000, 0): 1.56}))
    assert "DOES NOT HOLD" in text
    assert "+0.200" in text and "90 %" in text


def test_gaps_pair_seeds_and_leave_out_the_sweep() -> None:
    x = Losses(record({**GOOD, ("adamw", "sync", 2000, 1): 1.7, ("adamw", "delay", 2000, 100): 9.0}))
    assert x.gaps("adamw", "delay", 2000) == pytest.approx([0.2])
    assert x.recovered("adamw", "ef", 2000) == pytest.approx(0.9)


def test_record_is_written_after_each_run_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "VAL_BATCHES", 1)
    monkeypatch.setattr(study, "QUARTER_BATCHES", 1)
    out, told = tmp_path / "study.json", []
    runs = [Run(optimizer="adamw", lr=1e-3, steps=4, mode=mode, seed=0, batch=2) for mode in ("sync", "delay")]
    study.Study(out, told.append).do(runs[:1])
    first = json.loads(out.read_text())
    assert list(first["runs"]) == [runs[0].key]
    assert len(first["runs"][runs[0].key]["quarters"]) == 4
    assert {"hardware", "versions", "settings"} <= set(first)
    study.Study(out, told.append).do(runs)
    second = json.loads(out.read_text())
    assert list(second["runs"]) == [run.key for run in runs]
    assert second["runs"][runs[0].key] == first["runs"][runs[0].key]
    assert len(told) == 2
    monkeypatch.setattr(study, "CLIP", 2.0)
    with pytest.raises(typer.BadParameter, match="other settings"):
        study.Study(out, told.append)


def test_a_run_that_diverges_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = study.load_corpus()
    monkeypatch.setattr(study, "make_optimizer", lambda run, named: _exploding(named))
    run = Run(optimizer="adamw", lr=1.0, steps=40, mode="sync", seed=0, batch=2)
    assert study.train(run, corpus, study.validation(corpus))["loss"] is None


def _exploding(named: list[tuple[str, nn.Parameter]]) -> Any:
    import torch

    return torch.optim.SGD([p for _, p in named], 1e30, momentum=0.9)


def test_command_refuses_to_overwrite_and_reports(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    out = tmp_path / "study.json"
    missing = CliRunner().invoke(app, ["--report", "--out", str(out)])
    assert missing.exit_code != 0
    out.write_text(json.dumps(record(GOOD)))
    refused = CliRunner().invoke(app, ["--out", str(out)])
    assert refused.exit_code != 0
    shown = CliRunner().invoke(app, ["--report", "--out", str(out)])
    assert shown.exit_code == 0
    assert "AdamW" in shown.output and "R7" in shown.output


@pytest.mark.timeout(600)  # a quarter of a minute each on an idle core
@pytest.mark.parametrize(("name", "lr"), [("adamw", 2e-3), ("muon", 5e-3)])
def test_a_delay_costs_and_error_feedback_gives_back(name: str, lr: float) -> None:
    """400 steps of small batches, one seed: the gap is positive, and at least 30 % of it comes back.

    Batch and rates were chosen in trial runs so that the effect is plain; its size is measured by the study.
    """
    corpus = study.load_corpus()
    validate = study.validation(corpus)
    loss = {}
    for mode in ("sync", "delay", "ef"):
        run = Run(optimizer=name, lr=lr, steps=400, mode=mode, seed=0, batch=8)
        loss[mode] = study.train(run, corpus, validate)["loss"]
    gap = loss["delay"] - loss["sync"]
    assert gap > 0.02, loss
    assert (loss["delay"] - loss["ef"]) / gap > 0.3, loss
