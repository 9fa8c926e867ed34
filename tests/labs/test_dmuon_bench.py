"""What the bench of owner-sharded Muon stands on: equal work, counted bytes, and a refusal where either is wrong."""

import dataclasses

import pytest
import torch

from dist_lib.comm import launch
from labs.dmuon import bench
from labs.dmuon.methods import build
from labs.dmuon.timing import Timing, Work, counted_step, measure, set_gradients

TINY = Work(model="tiny-0.3m", ranks=2, steps=1)
GOOD = Timing(step_s=0.5, payload=(8, 8), formula=(8, 8), orthogonalised=1.0)


def stepped(name, rank):
    """Weights after two steps on the gradients that the bench uses, and how far they moved."""
    method = build(name, TINY.config(), seed=0, world=2, device=torch.device("cpu"))
    start = {n: p.detach().clone() for n, p in method.model.named_parameters()}
    for step in range(2):
        counted_step(method, rank, step)
    weights = {n: p.detach().clone() for n, p in method.model.named_parameters()}
    moved = max(float((weights[n] - start[n]).abs().max()) for n in weights)
    return weights, moved


def both():
    """On one rank: the owners' weights and the baseline's."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    return stepped("dmuon", rank), stepped("gather", rank)


def test_both_sides_do_the_same_work():
    """Two ranks: a sum of two has one value in any order, so only batching may differ."""
    first, second = launch(both, world_size=2)
    (ours, moved), (theirs, _), (other, _) = *first, second[0]
    apart = max(float((ours[n] - theirs[n]).abs().max()) for n in ours)
    assert ours.keys() == theirs.keys() and moved > 1e-3
    assert apart < 1e-4 * moved
    assert all(torch.equal(ours[n], other[n]) for n in ours)


@pytest.mark.parametrize(("name", "times"), [("dmuon", 1), ("gather", 2), ("adamw", 0)])
def test_counted_bytes_and_orthogonalisations(name, times):
    timing = measure(name, TINY)
    assert timing.payload == timing.formula and min(timing.payload) > 0
    assert timing.orthogonalised == times and timing.step_s > 0


def test_gradients_differ_by_rank_and_step():
    model = torch.nn.Linear(3, 2)
    found = []
    for rank, step in ((0, 0), (1, 0), (0, 1), (0, 0)):
        set_gradients(model, rank, step)
        found.append(model.weight.grad)
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_time_with_wrong_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda name, work: GOOD)
    assert bench.checked_seconds("dmuon", TINY) == 0.5
    with pytest.raises(bench.LabError, match=r"1 times, not 2"):
        bench.checked_seconds("gather", TINY)
    wrong = dataclasses.replace(GOOD, payload=(8, 9))
    monkeypatch.setattr(bench, "measure", lambda name, work: wrong)
    with pytest.raises(bench.LabError, match=r"\(8, 9\).*\(8, 8\)"):
        bench.checked_seconds("dmuon", TINY)


def test_rows_are_those_of_the_target():
    from labs.bench import find_rows

    rows = {row.name: row for lab, row in find_rows("dmuon")}
    assert rows["owner-step"].target == 0.35 and rows["owner-step-adamw"].target is None
    assert bench.WORK.ranks == 4 and bench.WORK.model == "small-4m"
