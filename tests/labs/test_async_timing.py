"""What the timing of a real pipeline is made of, checked on simulated events, whose times are exact."""

import json

import pytest

from dist_lib.async_pipeline import StageTimes, make_schedule, simulate
from labs.async_pipeline.sleeping import RECORD, SIZES, formula
from labs.async_pipeline.timing import Work, measure, take_apart


@pytest.mark.parametrize(("p", "m"), [*SIZES, (3, 3), (1, 2)])
@pytest.mark.parametrize("delay", [0, 1])
def test_simulated_events_give_the_formulas(p, m, delay):
    work = Work(stages=p, micro_batches=m, forward_s=0.02, backward_s=0.04)
    schedule = make_schedule(("1f1b", "2bw")[delay], stages=p, micro_batches=m, batches=work.batches)
    events = simulate(schedule, StageTimes(forward_s=0.02, backward_s=0.04)).events
    timing = take_apart(work, [([e for e in events if e.stage == s], {"norm": 1.0}) for s in range(p)])
    ideal = formula(work, delay)
    assert timing.period_s == pytest.approx(ideal["period_s"])
    assert timing.idle == pytest.approx(ideal["idle"])
    assert timing.busy_per_batch_s == pytest.approx(m * 0.06)
    assert (timing.imbalance, timing.waited_s) == (pytest.approx(0), {"norm": p})
    if delay:
        assert timing.slack_periods == pytest.approx(ideal["slack_periods"])


def test_a_real_run_is_taken_apart():
    timing = measure(Work(stages=2, micro_batches=2, batches=4, forward_s=1e-3, backward_s=2e-3), 1)
    assert timing.forward_s >= 1e-3 and timing.period_s >= 2 * 3e-3 and 0 < timing.idle < 1


def test_the_record_is_near_the_formulas():
    """The recorded run on a quiet machine: at most 5 % over the formula, a period of slack for each spare one."""
    rows = json.loads(RECORD.read_text())["sleeping"]
    assert [(r["stages"], r["micro_batches"], r["delay"]) for r in rows] == [(*s, d) for s in SIZES for d in (0, 1)]
    for row in rows:
        found, ideal = row["measured"], row["formula"]
        assert 1 <= found["period_s"] / ideal["period_s"] < 1.05
        if row["delay"]:
            assert abs(found["slack_periods"] - ideal["slack_periods"]) < 0.5
