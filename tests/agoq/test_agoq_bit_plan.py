"""Bits by pipeline stage: what is in flight, the four rules, peaks."""

from fractions import Fraction

import pytest

from dist_lib.agoq import ActivationPlan
from dist_lib.agoq.bit_plan import (
    RULES,
    WIDTHS,
    BudgetError,
    LayerCost,
    held_chunks,
    in_flight,
    make_bit_plan,
    ratio_bits,
    uniform_peak,
)
from dist_lib.async_pipeline.schedules import make_schedule

PAPER = LayerCost(5, 11)  # one layer of the paper's table 1: 5 U of attention, 11 U that are encoded
FOUR = {"layers": 32, "stages": 4, "micro_batches": 8, "chunks": 2}


def chosen(rule, **sizes):
    plan = make_bit_plan(rule, **(FOUR | {"cost": PAPER, "widths": None} | sizes))
    return tuple(plan.bits_of_stage(s) for s in range(plan.stages))


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"),
    [(1, 3, 1), (4, 8, 1), (4, 2, 1), (8, 8, 1), (4, 8, 2), (4, 4, 2), (2, 6, 3), (8, 16, 2), (3, 9, 4), (4, 4, 1)],
)
def test_in_flight_is_what_the_schedule_holds(stages, micro_batches, chunks):
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, batches=1, chunks=chunks)
    for stage, actions in enumerate(schedule.actions):
        held, moments = [0] * chunks, []
        for action in actions:
            if action.kind == "forward":
                held[action.chunk] += 1
                moments.append(tuple(held))
            elif action.kind == "backward":
                held[action.chunk] -= 1
        assert in_flight(stages, micro_batches, chunks)[stage] == max(map(sum, moments))
        assert list(held_chunks(stage, stages, micro_batches, chunks)) == moments


def test_the_papers_four_stages():
    assert in_flight(4, 8, 2) == (11, 9, 7, 5)
    assert Fraction(11, 5) == Fraction("2.2")
    assert chosen("paper") == ((4,), (5,), (6,), (8,))
    assert chosen("floor") == ((4,), (4,), (6,), (8,))
    assert chosen("budget") == ((4,), (6,), (10,), (16,))


def test_rounding_to_nearest_exceeds_the_encoded_share_and_flooring_never_does():
    counts = in_flight(4, 8, 2)
    assert [n * b for n, b in zip(counts, ratio_bits(counts, nearest=True), strict=True)] == [44, 45, 42, 40]
    assert ratio_bits((9, 8, 7, 2), nearest=True) == (4, 5, 5, 8) and ratio_bits((9, 8, 7, 2), nearest=False)[:3] == (
        4,
        4,
        5,
    )
    assert ratio_bits((8, 7), nearest=True) == (4, 5)  # 4.57
    for stages in range(1, 17):
        for chunks in (1, 2, 4):
            counts = in_flight(stages, 2 * stages, chunks)
            down = [n * b for n, b in zip(counts, ratio_bits(counts, nearest=False), strict=True)]
            assert max(down) == down[0]
    # The table for 4 stages reused for 8, each entry twice, as the paper suggests: the third stage exceeds the first.
    reused = [n * b for n, b in zip(in_flight(8, 16, 2), (4, 4, 5, 5, 6, 6, 8, 8), strict=True)]
    assert (reused[0], reused[2]) == (92, 95)


def test_stage_totals_of_table_1():
    def totals(rule):
        plan = make_bit_plan(rule, **FOUR, cost=PAPER, widths=None)
        return [float(t) / 4 for t in plan.totals(PAPER)]  # four layers a chunk

    assert totals("budget") == [85.25, 82.125, 83.125, 80.0]
    assert totals("paper")[0] == totals("floor")[0] == 85.25
    assert max(totals("paper")) == 85.25  # attention's share falls with what is in flight, so the whole still fits


def test_release_goes_by_layer_and_ignores_the_schedule():
    plan = make_bit_plan("release", layers=32, stages=4, micro_batches=8)
    assert [plan.bits_of_stage(s) for s in range(4)] == [(4,), (5,), (8,), (16,)]
    assert plan.stored_bits[8] == 8 and plan.bits[8] == 5
    mixed = make_bit_plan("release", **FOUR)
    assert mixed.bits_of_stage(0) == (4, 8) and mixed.bits_of_stage(3) == (5, 16)
    with pytest.raises(BudgetError, match=r"stage 0 .*stage 2"):
        mixed.check_peak(PAPER)


@pytest.mark.parametrize("scale_bits", [0, Fraction(1, 4)])
@pytest.mark.parametrize("sizes", [(4, 8, 2), (4, 8, 1), (8, 16, 2), (2, 2, 1), (16, 32, 1)])
@pytest.mark.parametrize("extra_kind", ["none", "embedding", "logits"])
def test_budget_rule_uses_what_there_is_and_no_more(sizes, scale_bits, extra_kind):
    stages, micro_batches, chunks = sizes
    cost, layers = LayerCost(3, 10, scale_bits), 32
    extra = [0.0] * stages
    if extra_kind == "embedding":
        extra[0], extra[-1] = 40.0, 40.0
    if extra_kind == "logits":
        extra[-1] = 500.0
    pipeline = {"layers": layers, "stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    limit = uniform_peak(layers, stages, micro_batches, chunks, cost, extra)
    plan = make_bit_plan("budget", **pipeline, cost=cost, extra=extra, widths=None)
    plan.check_peak(cost, extra)
    for stage, total in enumerate(plan.totals(cost, extra)):
        (bits,) = plan.bits_of_stage(stage)
        each = layers // stages // chunks * plan.in_flight[stage]
        assert total <= limit
        if bits < 16:  # one more bit would not fit
            assert each * cost.at(bits + 1) + extra[stage] > limit
    stored = make_bit_plan("budget", **pipeline, cost=cost, extra=extra)
    assert all(b in WIDTHS and b <= most for b, most in zip(stored.bits, plan.bits, strict=True))


def test_logits_can_eat_the_last_stages_slack():
    free = make_bit_plan("budget", **FOUR, cost=PAPER)
    tight = make_bit_plan("budget", **FOUR, cost=PAPER, extra=(0, 0, 0, 250))
    assert free.bits_of_stage(3) == (16,) and tight.bits_of_stage(3) == (4,)
    with pytest.raises(BudgetError, match="stage 3"):
        free.check_peak(PAPER, (0, 0, 0, 250))
    assert tight.bits_of_stage(0) == (6,)  # and the others may spend up to the stage that has become the dearest


def test_a_budget_that_is_too_small_names_the_stage():
    with pytest.raises(BudgetError, match=r"stage 0 holds 341 with 4 bits, more than the budget of 300"):
        make_bit_plan("budget", **FOUR, cost=PAPER, budget=300)
    plan = make_bit_plan("budget", **FOUR, cost=PAPER, budget=10_000)
    assert set(plan.bits) == {16}
    plan.check_peak(PAPER, budget=10_000)


def test_the_plan_speaks_to_the_layers():
    plan = make_bit_plan("paper", **FOUR)
    codecs = plan.codecs("nf4")
    assert codecs[:16:4] == ["nf4", "int5", "int6", "int8"] and codecs[:16] == codecs[16:]
    assert ActivationPlan(codec=codecs).per_layer(32) == codecs
    assert make_bit_plan("release", layers=4, stages=4, micro_batches=4).codecs() == ["fp4", "int5", "int8", None]
    with pytest.raises(ValueError, match="widths=WIDTHS"):
        make_bit_plan("budget", **FOUR, cost=PAPER, widths=None).codecs()


def test_every_layer_has_one_stage():
    plan = make_bit_plan("floor", **FOUR)
    owned = [i for s in range(4) for c in range(2) for i in plan.layers_of(s, c)]
    assert sorted(owned) == list(range(32)) and list(plan.layers_of(1, 1)) == [20, 21, 22, 23]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 30}, "30 layers do not divide"),
        ({"micro_batches": 6}, "multiple of 4 micro-batches"),
        ({"stages": 0}, "stages=0"),
        ({"rule": "best"}, "allowed are paper, floor, release, budget"),
        ({"rule": "budget"}, "give cost"),
        ({"rule": "budget", "cost": PAPER, "extra": (1, 2)}, "2 numbers for 4 stages"),
    ],
)
def test_errors_say_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        make_bit_plan(**({"rule": "paper", **FOUR} | change))
    assert len(RULES) == 4


def test_a_stage_that_is_none():
    with pytest.raises(ValueError, match="stages are 0 to 3"):
        list(held_chunks(4, 4, 8))
