"""The figures show the numbers of plans, formulas and models, and have controls and descriptions."""

import pytest

from dist_lib.comm import NetworkModel
from dist_lib.dmuon import DeviceCost, FlopCost, make_plan
from dist_lib.dmuon.bytes import MODES, wire_share
from dist_lib.dmuon.cost_model import exposed_seconds, reproduction_table
from dist_lib.dmuon.figures import balance_figure, bytes_figure, overlap_figure, owners_figure, reproduction_figure
from dist_lib.dmuon.workloads import workload

COST = DeviceCost(work=FlopCost(form="gram", symmetric=True))


def shown(fig, **state):
    return [t for t in fig.data if all((t.meta or {}).get(k, v) == v for k, v in state.items())]


def test_balance_shows_fullest_owner_mean_and_floor():
    fig = balance_figure(("llama3-8b", "wallx"), (8, 64), methods=("lpt", "round_robin"))
    full, mean, floor = shown(fig, model="wallx", method="dearest first")
    assert full.y[1] == pytest.approx(floor.y[1]) and floor.y[1] > 2 * mean.y[1]
    assert full.y[0] == pytest.approx(mean.y[0], rel=0.01)
    assert full.y[0] == pytest.approx(1e3 * max(make_plan(workload("wallx"), 8, cost=COST).rank_loads))
    (turn, *_) = shown(fig, model="wallx", method="in turn")
    assert turn.y[0] > 1.1 * full.y[0]
    assert [c["key"] for c in fig.layout.meta["controls"]] == ["model", "method"]
    assert "wallx beyond about 25 ranks" in fig.layout.meta["alt"]


def test_owners_shows_every_matrix_once_a_method():
    specs = workload("tiny-0.3m")
    fig = owners_figure(specs, 4, cost=FlopCost())
    for method, key in (("dearest first", "lpt"), ("all on rank 0", "rank0")):
        boxes = [
            b
            for t in shown(fig, method=method)
            if t.type == "bar"
            for b in zip(t.customdata, t.y, t.x, t.base, strict=True)
        ]
        assert sorted(b[0] for b in boxes) == sorted(m.name for m in specs)
        plan = make_plan(specs, 4, method=key)
        assert {b[0]: b[1] for b in boxes} == {n: f"rank {r}" for n, r in plan.owners.items()}
        assert max(b[2] + b[3] for b in boxes) == pytest.approx(1e-9 * max(plan.rank_loads))
    with pytest.raises(ValueError, match="nothing to own"):
        owners_figure([], 4)


def test_bytes_add_up_to_the_formulas():
    fig = bytes_figure(8, shards=4)
    for k in (1, 4):
        bars = shown(fig, micro_batches=k)
        for mode, name in MODES.items():
            total = sum(t.x[t.y.index(name)] for t in bars)
            assert total == pytest.approx(
                float(wire_share(mode, 8, shards=4 if "hsdp" in mode else None, micro_batches=k))
            )


def test_reproduction_shows_every_row():
    fig, rows = reproduction_figure(), reproduction_table()
    points = [p for t in fig.data if t.mode == "markers" for p in zip(t.x, t.y, strict=True)]
    assert sorted(points) == sorted((r.published.milliseconds, r.modelled_ms) for r in rows)
    assert "23 are within 30 percent" in fig.layout.meta["alt"]


def test_overlap_shows_the_waiting_of_the_formula():
    specs, network = workload("qwen2.5-7b"), NetworkModel(20e-6, 25e9)
    plan = make_plan(specs, 8, method="lpt")
    layers = [[m.name for m in specs if m.name.startswith(f"layers.{i}.")] for i in range(6)]
    fig = overlap_figure(plan, layers, network, compute_ms=(5, 40))
    for ms in (5, 40):
        bars = {t.name: t for t in shown(fig, ms=ms)}
        waiting = bars["layer waits for weights"]
        assert sum(waiting.x) == pytest.approx(1e3 * exposed_seconds(plan, layers, ms / 1e3, network))
        computing, sending = bars["layer computes"], bars["weights travel"]
        assert len(computing.x) == len(sending.x) == 6
        for begin, sent, took in zip(computing.base, sending.base, sending.x, strict=True):
            assert begin >= sent + took - 1e-9  # no layer starts before its weights are there
    assert len(waiting.x) == 1  # 40 ms hide all but the first
    with pytest.raises(ValueError, match="at least one layer"):
        overlap_figure(plan, [], network)
