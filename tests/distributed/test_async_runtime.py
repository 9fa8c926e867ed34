"""The pipeline's runtime against its single-process twin, bit for bit; and what must break that equality."""

import functools
import itertools

import pytest
import torch
from torch import nn

from dist_lib.async_pipeline import numerics
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.emulator import DelayedTrainer
from dist_lib.async_pipeline.schedules import make_schedule
from dist_lib.async_pipeline.versions import VersionError, WeightVersions
from dist_lib.comm import RankError, launch
from tests.distributed import ranks_of_async as ranks

COMBINATIONS = list(itertools.product(("adamw", "muon"), (False, True), (None, 0.5), (False, True)))
SIZES = {p: [m for m in range(p - 1, 2 * p + 1) if m] for p in (1, 2, 3, 4)}
FIRST = {p: sum(len(SIZES[q]) for q in range(1, p)) for p in SIZES}


def cases(p):
    """One of the sixteen combinations for each m, all sixteen over the whole grid; one case without a delay, and one
    that all depths share."""
    found = {}
    for position, m in enumerate(SIZES[p]):
        optimizer, feedback, clip, tied = COMBINATIONS[5 * (FIRST[p] + position) % 16]
        options = {"micro_batches": m, "error_feedback": feedback, "clip_norm": clip, "allow_edge": True}
        found[f"m={m} {optimizer} ef={feedback} clip={clip} tied={tied}"] = (options, optimizer, tied)
    found["no delay"] = ({"micro_batches": p, "delay": 0, "clip_norm": 0.5}, "adamw", True)
    found["any depth"] = ({"micro_batches": 4}, "muon", False)
    return found


@functools.cache
def run(p):
    """What every rank returned for every case."""
    return launch(ranks.run_cases, world_size=p, args=(cases(p),), timeout_s=110)


def twin(p, options, optimizer, tied, kind=DelayedTrainer, factor=1):
    config = AsyncConfig(**options)
    trainer = kind(
        ranks.modules(p, tied),
        loss_fn=ranks.loss_fn,
        make_optimizer=ranks.OPTIMIZERS[optimizer],
        config=config,
        make_scheduler=ranks.scheduler if optimizer == "adamw" and factor == 1 else None,
    )
    losses = trainer.run(ranks.batches(ranks.UPDATES, factor * ranks.rows(config)))
    outcomes = []
    for stage, newest in zip(trainer.state_dict()["stages"], trainer.parameters_by_stage(), strict=True):
        older = stage["versions"].get(trainer.step - 1, newest)
        outcomes.append((losses, newest, older))
    return outcomes


@pytest.mark.parametrize("p", SIZES)
def test_bits_of_the_twin(p):
    for name, case in cases(p).items():
        expected = twin(p, *case)
        for stage in range(p):
            assert ranks.same(run(p)[stage][name], expected[stage]), f"{name}, stage {stage}"


def test_all_combinations_are_tried():
    tried = {
        tuple(case[0][k] for k in ("error_feedback", "clip_norm")) + case[1:]
        for p in SIZES
        for case in [c for n, c in cases(p).items() if n.startswith("m=")]
    }
    assert len(tried) == 16


def test_a_delay_changes_the_weights():
    delayed = run(2)[0]["any depth"][1]
    synchronous = twin(2, {"micro_batches": 4, "delay": 0}, "muon", False)[0][1]
    assert max((delayed[n] - synchronous[n]).abs().max().item() for n in delayed) > 1e-3


def test_depth_changes_nothing():
    whole = {p: {n: w for rank in run(p) for n, w in rank["any depth"][1].items()} for p in (1, 2, 4)}
    for p in (2, 4):
        assert whole[p].keys() == whole[1].keys()
        assert all(torch.equal(whole[p][name], whole[1][name]) for name in whole[1])
        assert run(p)[0]["any depth"][0] == run(1)[0]["any depth"][0]


@pytest.mark.parametrize("p", SIZES)
def test_what_was_done_is_the_schedule(p):
    """Order, versions and the moment of each update, as the schedule says; at most p - s in flight."""
    for name, (options, _, _) in cases(p).items():
        kind = "1f1b" if options.get("delay") == 0 else "2bw"
        edge = {"allow_edge": True} if kind == "2bw" else {}
        m = options["micro_batches"]
        schedule = make_schedule(kind, stages=p, micro_batches=m, batches=ranks.UPDATES, **edge)
        for stage in range(p):
            events = run(p)[stage][name][3]
            assert tuple(e.action for e in events) == schedule.actions[stage], f"{name}, stage {stage}"
            assert all(e.stage == stage and 0 <= e.start_s <= e.end_s for e in events)
            assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(events))


OPTIONS = {"micro_batches": 2}


def test_the_time_of_an_update_does_not_matter():
    for stage, found in enumerate(launch(ranks.with_fault, world_size=2, args=("eager", OPTIONS))):
        assert ranks.same(found, plain_twin()[stage])


def plain_twin():
    config = AsyncConfig(**OPTIONS)
    trainer = ranks.twin(2, config)
    losses = trainer.run(ranks.batches(ranks.UPDATES, ranks.rows(config)))
    states = zip(trainer.state_dict()["stages"], trainer.parameters_by_stage(), strict=True)
    return [(losses, newest, state["versions"][trainer.step - 1]) for state, newest in states]


@pytest.mark.parametrize("fault", ["reads newest", "in place, unseen"])
def test_planted_faults_break_the_equality(fault):
    found, expected = launch(ranks.with_fault, world_size=2, args=(fault, OPTIONS)), plain_twin()
    assert not ranks.same(found[0], expected[0])


def test_autograd_notices_an_update_in_place():
    with pytest.raises(RankError, match="modified by an inplace operation"):
        launch(ranks.with_fault, world_size=2, args=("in place", OPTIONS))


def test_banks_of_live_graphs_are_not_overwritten():
    torch.manual_seed(0)
    versions = WeightVersions(nn.Linear(2, 2), 2)
    step = torch.optim.SGD([p for _, p in versions.parameters], lr=0.1).step
    y = versions.forward(0, torch.ones(1, 2))
    versions.advance([torch.ones(2, 2), None], step)
    assert not torch.equal(versions.at(1)["weight"], versions.at(0)["weight"])
    assert versions.at(1)["weight"].data_ptr() == versions.module.weight.data_ptr()
    with pytest.raises(VersionError, match="version 0 cannot be overwritten"):
        versions.advance([None, None], step)
    y.sum().backward()
    assert torch.equal(versions.release(0)[0], torch.ones(2, 2))
    versions.advance([None, None], step)
    with pytest.raises(VersionError, match="not kept"):
        versions.at(0)
    banks = {w.data_ptr() for bank in versions._banks for w in bank.values()}
    assert len(banks) == 2 * 2


class Replicated(DelayedTrainer):
    """The twin of two replicas: each adds up its own micro-batches, then both are averaged in order."""

    def train_batch(self, inputs, targets):
        halves, losses = [], []
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            m = self.config.micro_batches
            leaves = [s.leaves(self.version_of(i), self.step, None) for i, s in enumerate(self._stages)]
            sums = [[None] * len(stage.parameters) for stage in self._stages]
            pairs = zip(numerics.split_batch(x, m), numerics.split_batch(y, m), strict=True)
            losses.append(numerics.mean_loss([self._micro_batch(a, b, leaves, sums) for a, b in pairs]))
            for part in sums:
                numerics.average(part, m)
            halves.append(sums)
        mean = [[(a + b) / 2 for a, b in zip(*parts, strict=True)] for parts in zip(*halves, strict=True)]
        self._add_tied(mean)
        self._clip(mean)
        for stage, gradients in zip(self._stages, mean, strict=True):
            stage.update(gradients, self.step, max(self.step + 1 - stage.delay, 0))
        self.step += 1
        return numerics.mean_loss(losses)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_replicas_of_two_stages(optimizer):
    options = {"micro_batches": 2, "clip_norm": 0.5, "error_feedback": True}
    expected = twin(2, options, optimizer, True, kind=Replicated, factor=2)
    for rank, found in enumerate(launch(ranks.replicas, world_size=4, args=(options, optimizer))):
        assert ranks.same(found, expected[rank // 2]), f"rank {rank}"


def test_checkpoint_after_a_drain(tmp_path):
    for same, step, files, refused in launch(ranks.resumed, world_size=2, args=(str(tmp_path),)):
        assert same and step == 5
        assert files == ["step-00000002", "step-00000005", "step-00000009.partial"]
        assert "another configuration" in refused and "error_feedback was True, is False" in refused


@pytest.mark.parametrize("p", [2, 4])
def test_random_sleeps_change_nothing(p):
    assert launch(ranks.sleepy, world_size=p, args=(0,), timeout_s=110) == [0] * p


def test_bytes_on_the_wire():
    """Three batches of 4 micro-batches of 2 rows: 6 tokens of width 16 in float32, there and back."""
    message, tied, batches_, m = 2 * 6 * 16 * 4, 32 * 16 * 4, 3, 4
    for table in launch(ranks.counted, world_size=2):
        assert table["send"] == (batches_ * m + batches_, batches_ * m * message + batches_ * tied)
        assert table["all_reduce"] == (batches_, batches_ * 2 * 4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_torchs_own_pipeline_agrees_without_delay(schedule):
    for losses, weights in launch(ranks.against_torch, world_size=2, args=(schedule,)):
        assert losses < 1e-6 and weights < 1e-6
