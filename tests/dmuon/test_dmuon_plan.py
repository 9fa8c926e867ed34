"""The owner plan: optimal where that can be checked, never below its bound, the same in any order, refusals clear."""

import itertools
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_lib.comm import fingerprint
from dist_lib.dmuon import DeviceCost, FlopCost, MatrixSpec, MeasuredCost, OwnerPlan, make_plan, matrix_specs
from dist_lib.dmuon.bytes import column_elements
from dist_lib.dmuon.costs import best_splits
from dist_lib.dmuon.layout import assign_names, layer_of, natural_key, rank_of_slot, slot
from dist_lib.dmuon.milp import _best_pattern, all_patterns, solve
from dist_lib.dmuon.solvers import Problem, greedy, improve, lower_bound, lpt
from dist_lib.dmuon.workloads import WORKLOADS, shape_counts, workload

SHAPES = [(1, 7), (7, 1), (3, 5), (8, 8), (8, 24), (13, 17), (24, 8)]


def named(shapes):
    return [(f"layers.{i}.weight", s) for i, s in enumerate(shapes)]


def brute_force(problem):
    """Least makespan over all ways to deal every class out: each rank's count, rank after rank."""
    kinds = range(len(problem.counts))

    def deals(count, ranks):
        if ranks == 1:
            return [(count,)]
        return [(k, *rest) for k in range(count + 1) for rest in deals(count - k, ranks - 1)]

    best = math.inf
    for deal in itertools.product(*(deals(c, problem.world) for c in problem.counts)):
        best = min(best, max(problem.load([deal[k][r] for k in kinds]) for r in range(problem.world)))
    return best


@st.composite
def problems(draw):
    world = draw(st.integers(1, 3))
    totals = []
    for _ in range(draw(st.integers(1, 3))):
        count, alone = draw(st.integers(1, 4)), draw(st.integers(1, 40))
        saving = draw(st.sampled_from([1.0, 0.8, 0.4, 0.0]))  # what each further matrix of a batch costs
        times = {b: alone * (1 + saving * (b - 1)) for b in range(1, draw(st.integers(1, 4)) + 1)}
        totals.append(best_splits(MeasuredCost.from_mapping({(4, 4): times}), (4, 4), count)[0])
    sizes = tuple(draw(st.integers(1, 9)) for _ in totals)
    return Problem(tuple(totals), sizes, world)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_integer_program_finds_the_optimum_and_no_bound_exceeds_it(problem):
    optimum = brute_force(problem)
    patterns, bound = solve(problem, start=lpt(problem), gap=0.0)
    assert problem.makespan(patterns) == pytest.approx(optimum, rel=1e-9)
    assert [sum(c) for c in zip(*patterns, strict=True)] == list(problem.counts)
    assert lower_bound(problem) <= optimum * (1 + 1e-12)
    assert optimum * (1 - 1e-5) <= bound <= optimum * (1 + 1e-12)  # bisection ends at 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_keeps_grahams_guarantee(costs, world):
    counts = {c: costs.count(c) for c in costs}
    problem = Problem(
        tuple(tuple(float(c * k) for k in range(n + 1)) for c, n in counts.items()), (1,) * len(counts), world
    )
    optimum = brute_force(problem)
    assert problem.makespan(lpt(problem)) <= (4 / 3 - 1 / (3 * world)) * optimum + 1e-9
    assert problem.makespan(greedy(problem)) <= problem.makespan(lpt(problem))
    assert lower_bound(problem) <= optimum + 1e-9


def test_generated_patterns_prove_what_listed_ones_do(monkeypatch):
    """Column generation alone (as for large models) reaches the same optimum and a bound within 0.1 %."""
    specs, cost = workload("llama3-8b"), DeviceCost()
    listed = make_plan(specs, 24, method="milp", cost=cost)
    monkeypatch.setattr("dist_lib.dmuon.milp.all_patterns", lambda *a, **k: None)
    generated = make_plan(specs, 24, method="milp", cost=cost)
    assert max(generated.rank_loads) <= max(listed.rank_loads) * 1.001
    assert generated.lower_bound <= max(listed.rank_loads)
    assert generated.above_bound < 1.001
    assert max(make_plan(specs, 24, cost=cost).rank_loads) > 1.02 * max(generated.rank_loads)


def test_what_is_not_proven_does_not_raise_the_bound(monkeypatch):
    problem = Problem(((0.0, 3.0, 6.0, 9.0), (0.0, 2.0, 4.0, 6.0, 8.0)), (1, 1), 3)
    monkeypatch.setattr("dist_lib.dmuon.milp._combine", lambda *a, **k: (None, False))  # ran out of nodes
    assert solve(problem, start=lpt(problem), gap=0.0)[1] == lower_bound(problem)


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.integers(0, 9), min_size=3, max_size=3), st.floats(1.0, 2.0))
def test_a_patterns_value_is_never_underestimated(problem, prices, factor):
    """Rounding must fall on the side that keeps the bound a bound; the pattern may exceed the target by as little."""
    target = factor * max(t[1] for t in problem.totals)
    ranges = [range(c + 1) for c in problem.counts]
    fitting = [p for p in itertools.product(*ranges) if problem.load(p) <= target]
    best = max(sum(k * v for k, v in zip(p, prices, strict=False)) for p in fitting)
    top, pattern = _best_pattern(problem, prices[: len(ranges)], target)
    assert top >= best - 1e-9
    assert top == pytest.approx(sum(k * v for k, v in zip(pattern, prices, strict=False)))
    assert problem.load(pattern) <= target * 1.001


def test_patterns_are_maximal_and_within_the_target():
    problem = Problem(((0.0, 3.0, 6.0), (0.0, 2.0, 4.0, 6.0)), (1, 1), 2)
    assert sorted(all_patterns(problem, 7.0)) == [(0, 3), (1, 2), (2, 0)]
    assert all_patterns(problem, 7.0, limit=2) is None


def test_batches_and_owners_are_decided_together():
    """Four equal matrices: together they cost little more than one, yet on four ranks they belong apart."""
    times = {(4, 4): {1: 1.0, 2: 1.2, 4: 1.4}}
    alone = make_plan(named([(4, 4)] * 4), 1, method="milp", cost=times)
    assert alone.rank_loads == (1.4,) and [len(b) for b in alone.batches] == [4]
    pairs = make_plan(named([(4, 4)] * 4), 2, method="milp", cost=times)
    assert pairs.rank_loads == (1.2, 1.2) and [len(b) for b in pairs.batches_of(0)] == [2]
    apart = make_plan(named([(4, 4)] * 4), 4, method="milp", cost=times)
    assert apart.rank_loads == (1.0,) * 4 and apart.lower_bound == 1.0


def test_workload_of_417_matrices_reaches_its_bounds():
    cost = DeviceCost(call_s=1e-4, full_rows=2048, work=FlopCost(form="gram", symmetric=True))
    specs = workload("wallx")
    assert len(specs) == 417
    eight = make_plan(specs, 8, method="milp", cost=cost)
    assert 1e3 * eight.lower_bound == pytest.approx(49.6, abs=0.1)
    assert 1e3 * max(eight.rank_loads) <= 50.0
    unbatched = DeviceCost(call_s=1e-4, full_rows=2048, work=FlopCost(form="gram", symmetric=True, batch=1))
    assert 1e3 * max(make_plan(specs, 8, cost=unbatched).rank_loads) == pytest.approx(73.6, abs=0.1)
    many = make_plan(specs, 32, method="milp", cost=cost)
    assert many.above_bound == 1.0 and 1e3 * many.lower_bound == pytest.approx(15.74, abs=0.01)  # one 5120 x 5120


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(SHAPES), max_size=12),
    st.integers(1, 6),
    st.sampled_from(["lpt", "milp", "round_robin", "rank0"]),
    st.randoms(),
)
def test_a_plan_covers_everything_once_in_any_order(shapes, world, method, random):
    items = named(shapes)
    plan = make_plan(items, world, method=method)
    assert sorted(m.name for r in range(world) for m in plan.owned_by(r)) == sorted(n for n, _ in items)
    assert sorted(n for r in range(world) for b in plan.batches_of(r) for n in b) == sorted(n for n, _ in items)
    assert plan.loads() == pytest.approx(plan.loads("flops"))
    assert max(plan.rank_loads) >= plan.lower_bound * (1 - 1e-9)
    assert sum(plan.bytes_per_rank) == 8 * sum(m * n for m, n in shapes)
    shuffled = list(items)
    random.shuffle(shuffled)
    again = make_plan([(n, torch.empty(s, device="meta")) for n, s in shuffled], world, method=method)
    assert again == plan and fingerprint(again) == fingerprint(plan) and again.to_json() == plan.to_json()
    assert OwnerPlan.from_json(plan.to_json()) == plan


def test_methods_are_ordered():
    specs = workload("qwen2.5-7b")
    largest = {m: max(make_plan(specs, 16, method=m).rank_loads) for m in ("milp", "lpt", "round_robin", "rank0")}
    assert largest["milp"] <= largest["lpt"] < largest["round_robin"] < largest["rank0"]


@pytest.mark.parametrize(
    ("model", "ratios"),
    [("qwen2.5-7b", (1.00, 1.01, 1.01, 1.18, 1.18, 2.36)), ("wallx", (1.00, 1.00, 1.28, 2.56, 5.12, 10.24))],
)
def test_balance_of_real_shapes(model, ratios):
    found = [
        make_plan(workload(model), r, cost=DeviceCost(work=FlopCost(form="gram", symmetric=True))).balance
        for r in (8, 16, 32, 64, 128, 256)
    ]
    assert found == pytest.approx(ratios, abs=0.006)


def test_memory_comes_second():
    """Equal costs, unequal sizes: loads stay as they are and bytes even out; with slack, further."""
    problem = Problem(((0.0, 5.0, 10.0), (0.0, 5.0, 10.0)), (100, 1), 2)
    assert max(map(problem.size, improve(problem, [(2, 0), (0, 2)], budget=10.0))) == 101
    costs = {(2, 50): 1.0, (10, 10): 1.05, (1, 3): 1.0, (2, 2): 1.05}
    items = named([(2, 50), (10, 10), (1, 3), (2, 2)])
    strict = make_plan(items, 2, cost=costs)
    loose = make_plan(items, 2, cost=costs, memory_slack=0.1)
    assert max(loose.bytes_per_rank) <= max(strict.bytes_per_rank)
    assert max(loose.rank_loads) <= 1.1 * max(strict.rank_loads)


@given(st.integers(1, 9), st.integers(1, 9))
def test_slots_are_met_once_each(nodes, gpus):
    assert sorted(rank_of_slot(w, nodes, gpus) for w in range(nodes * gpus)) == list(range(nodes * gpus))


def test_slots_are_the_papers_on_four_nodes_of_eight():
    for w in range(200):
        assert slot(w, 4, 8) == ((w % 4) ^ ((w // 8) % 4), w % 8)
    nodes = [slot(w, 4, 8)[0] for w in range(32)]
    assert nodes[:8] != nodes[8:16]  # the owning node rotates


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b", "wallx"])
def test_layers_are_spread_and_columns_even(model):
    """Nearly all of a layer's matrices have GPUs of their own; Eq. 3 alone cannot also keep the bytes even."""
    specs = workload(model)
    plan, blind = make_plan(specs, 32, nodes=4), make_plan(specs, 32, nodes=4, method="round_robin")
    layers = {}
    for name, rank in plan.owners.items():
        layers.setdefault(layer_of(name), []).append(rank)
    several = [ranks for ranks in layers.values() if len(ranks) > 1]
    assert sum(len({r % 8 for r in ranks}) / len(ranks) for ranks in several) > 0.93 * len(several)
    assert sum(len({r // 8 for r in ranks}) / 4 for ranks in several) > 0.93 * len(several)

    def unevenness(plan):
        columns = column_elements(plan, 8)
        return 8 * max(columns) / sum(columns)

    assert unevenness(plan) < 1.05 and unevenness(plan) <= unevenness(blind)
    if model == "wallx":
        assert unevenness(blind) > 3.5


def test_equal_loads_stand_apart():
    plan = make_plan(named([(9, 9), (9, 9), (2, 3), (2, 3)]), 4, nodes=2)
    first, second = plan.owner("layers.0.weight"), plan.owner("layers.1.weight")
    assert first // 2 != second // 2 and first % 2 != second % 2  # neither node nor GPU in common


def test_names_sort_as_people_count():
    names = ["layers.10.a", "layers.2.b", "layers.2.a", "head"]
    assert sorted(names, key=natural_key) == ["head", "layers.2.a", "layers.2.b", "layers.10.a"]
    assert layer_of("blocks.3.mlp.weight") == "blocks.3" and layer_of("head.weight") == "head"
    with pytest.raises(ValueError, match="quotas allow 1 matrices, there are 2"):
        assign_names([("a", 0), ("b", 0)], [[1], [0]])


def test_costs_count_the_square_term_and_batches():
    assert FlopCost(form="direct").of((2, 3), 2) == 2 * (20 * 4 * 3 + 10 * 8)
    assert FlopCost(form="gram", symmetric=True).of((3, 2), 1) == 6 * 4 * 3 + 14 * 8
    assert FlopCost(form="direct").of((5, 2, 3), 1) == 5 * FlopCost(form="direct").of((2, 3), 1)
    table = MeasuredCost.from_mapping({(6, 4): {1: 2.0, 4: 5.0, 8: 4.0}})
    assert [table.of((4, 6), b) for b in (1, 2, 4, 8)] == [2.0, 3.0, 5.0, 5.0]  # noise below a smaller batch is lifted
    assert table.of((3, 4, 6), 3) == 5.0 + 2.0  # nine: eight and one
    small = DeviceCost(1e12, full_rows=100)
    assert small.of((50, 50), 1) == small.of((50, 50), 4) == small.of((50, 50), 8) / 2  # four fill the device


def test_splits_are_the_cheapest():
    totals, splits = best_splits(MeasuredCost.from_mapping({(4, 4): {1: 1.0, 2: 1.9, 3: 2.1}}), (4, 4), 5)
    assert totals == pytest.approx((0, 1.0, 1.9, 2.1, 3.1, 4.0))
    assert splits[4] == (3, 1) and splits[5] == (3, 2)


def test_owners_may_be_given():
    plan = make_plan(named([(4, 4), (4, 4)]), 3, owners={"layers.0.weight": 2, "layers.1.weight": 2})
    assert (
        plan.method == "given"
        and plan.owned_by(0) == ()
        and plan.batches_of(2) == (("layers.0.weight", "layers.1.weight"),)
    )
    assert plan.balance == 3.0
    with pytest.raises(ValueError, match=r"missing: \['layers.1.weight'\].*unknown: \['x'\].*outside: \['x -> 9'\]"):
        make_plan(named([(4, 4), (4, 4)]), 3, owners={"layers.0.weight": 0, "x": 9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "best"}, "allowed are milp, lpt"),
        ({"world_size": 0}, "at least one rank"),
        ({"world_size": 4, "nodes": 3}, "same number on every node"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"cost": "time"}, "allowed are 'flops'"),
        ({"cost": {(9, 9): 1.0}}, "no measured time for 4x6: the table has 9x9"),
        ({"cost": {}}, "empty"),
        ({"cost": {(4, 6): {2: 1.0}}}, "for batch 1"),
        ({"cost": {(4, 6): 1.0, (6, 4): 1.0}}, "once"),
        ({"cost": {(4, 6): float("nan")}}, "finite time above 0"),
        ({"matrices": [("a", (4, 6)), ("a", (4, 6))]}, "more than once: a"),
        ({"matrices": [("a", (4,))]}, "need a matrix"),
        ({"matrices": [("a", (4, 0))]}, "sizes of at least 1"),
        ({"matrices": [("", (4, 6))]}, "no name"),
    ],
)
def test_refusals_say_what_is_allowed(change, message):
    arguments = {"matrices": [("a", (4, 6))], "world_size": 2, **change}
    with pytest.raises(ValueError, match=message):
        make_plan(arguments.pop("matrices"), arguments.pop("world_size"), **arguments)


def test_plans_are_checked_when_read():
    plan = make_plan(named([(4, 4), (4, 4)]), 2)
    data = json.loads(plan.to_json())
    for key, value, message in [
        ("entries", [["layers.0.weight", [4, 4], 5], data["entries"][1]], "outside of 2 ranks"),
        ("batches", [["layers.0.weight"]], "names every matrix once"),
        ("batches", [["layers.0.weight", "layers.1.weight"]], "mixes shapes or owners"),
    ]:
        with pytest.raises(ValueError, match=message):
            OwnerPlan.from_json(json.dumps({**data, key: value}))
    with pytest.raises(ValueError, match="not an owner plan"):
        OwnerPlan.from_json('{"entries": 3}')
    with pytest.raises(KeyError, match="no matrix 'x'"):
        plan.owner("x")
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        plan.owned_by(2)


def test_without_scipy_only_the_integer_program_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dist-lib\[dmuon\]', or use method='lpt'"):
        make_plan(named([(4, 4), (3, 5)]), 2, method="milp")
    assert make_plan(named([(4, 4), (3, 5)]), 2).world_size == 2


def test_a_time_limit_still_gives_a_plan():
    plan = make_plan(workload("wallx"), 12, method="milp", time_limit_s=1e-3)
    assert plan.above_bound < 1.1


def test_workloads_have_the_known_sizes():
    counts = {n: (len(workload(n)), round(sum(m.numel for m in workload(n)) / 1e9, 2)) for n in WORKLOADS}
    assert counts["wallx"] == (417, 3.79) and counts["pi0"] == (414, 2.7) and counts["qwen2.5-7b"] == (196, 6.53)
    assert shape_counts(workload("llama3-8b")) == {
        (4096, 14336): 32,
        (14336, 4096): 64,
        (4096, 4096): 64,
        (1024, 4096): 64,
    }
    with pytest.raises(KeyError, match="there are tiny"):
        workload("gpt")
    assert matrix_specs([MatrixSpec("b", (2, 2)), MatrixSpec("a", (2, 2))])[0].name == "a"
