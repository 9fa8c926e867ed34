"""Simulated time against closed forms and hand counts; the slack for clipping; the quadratic against its tables."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dist_lib.async_pipeline import (
    ScheduleError,
    Simulation,
    StageTimes,
    format_schedule,
    formulas,
    make_schedule,
    simulate,
    simulate_quadratic,
    stability_limit,
    stationary_second_moment,
)
from dist_lib.async_pipeline.quadratic import Mode

TIMES = StageTimes(forward_s=0.02, backward_s=0.04)
DURATIONS = st.integers(1, 20).map(lambda n: n / 8)


def run(name: Any, p: int, m: int, batches: int, times: Any = TIMES, chunks: int = 1, **more: Any) -> Simulation:
    schedule = make_schedule(name, stages=p, micro_batches=m, batches=batches, chunks=chunks, allow_edge=True)
    return simulate(schedule, times, **more)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("global_norm", [False, True])
def test_total_times(p: int, global_norm: bool) -> None:
    for m in range(max(p - 1, 1), 2 * p + 1):
        for batches in (1, 4):
            never = run("2bw", p, m, batches, global_norm=global_norm)
            assert never.makespan_s == pytest.approx((batches * m + p - 1) * 0.06)
            for name in ("1f1b", "gpipe"):
                flushed = run(name, p, m, batches, global_norm=global_norm)
                assert flushed.makespan_s == pytest.approx(batches * (m + p - 1) * 0.06)
                for s in range(p):
                    assert flushed.idle_share(s) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(
    ("p", "m", "flushed_ms", "never_ms", "flushed_idle", "never_idle"),
    [(2, 2, 180, 120, 0.333, 0.077), (4, 4, 420, 240, 0.429, 0.111), (4, 8, 660, 480, 0.273, 0.059)],
)
def test_reference_rows(
    p: int, m: int, flushed_ms: float, never_ms: float, flushed_idle: float, never_idle: float
) -> None:
    flushed, never = run("1f1b", p, m, 6), run("2bw", p, m, 6)
    assert flushed.makespan_s / 6 == pytest.approx(flushed_ms / 1000)
    assert (never.makespan_s - (p - 1) * 0.06) / 6 == pytest.approx(never_ms / 1000)
    assert flushed.idle_share(0) == pytest.approx(flushed_idle, abs=5e-4)
    assert never.idle_share(0) == pytest.approx(never_idle, abs=5e-4)
    assert formulas.ideal_speedup(stages=p, micro_batches=m) == pytest.approx(flushed_ms / never_ms)
    ratio = flushed.makespan_s / never.makespan_s
    assert formulas.ideal_speedup(stages=p, micro_batches=m, batches=6) == pytest.approx(ratio)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw"]),
    p=st.integers(1, 6),
    m=st.integers(1, 10),
    batches=st.integers(1, 3),
    chunks=st.integers(1, 3),
    forward=DURATIONS,
    first=DURATIONS,
    second=DURATIONS,
)
def test_simulation_equals_the_closed_forms(
    name: Any, p: int, m: int, batches: int, chunks: int, forward: float, first: float, second: float
) -> None:
    if name == "interleaved":
        m = p * (1 + m % 3)
    chunks = chunks if name == "interleaved" else 1
    assume(name != "2bw" or m >= max(p - 1, 1))
    if name == "zb-h1":
        second = min(first, second, forward)
    times = StageTimes(forward_s=forward, backward_input_s=first, backward_weight_s=second)
    found = run(name, p, m, batches, times, chunks)
    sizes = {"stages": p, "micro_batches": m, "batches": batches, "chunks": chunks}
    assert found.makespan_s == pytest.approx(formulas.makespan_s(name, times, **sizes), rel=1e-12)
    for s in range(p):
        held = formulas.activation_micro_batches(name, stage=s, **sizes)
        assert found.activation_micro_batches[s] == pytest.approx(held)
        assert found.busy_s(s) == pytest.approx(batches * m * times.period_s)
    if name != "zb-h1" or forward == first == second:
        assert found.idle_share(0) == pytest.approx(formulas.idle_share(name, **sizes), abs=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 4, 2), (4, 8, 3)])
def test_interleaving_divides_the_bubble(p: int, m: int, v: int) -> None:
    found = run("interleaved", p, m, 2, chunks=v)
    for s in range(p):
        assert found.idle_share(s) == pytest.approx((p - 1) / (v * m + p - 1))
    if m > p:
        assert found.activation_micro_batches[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_zero_bubble_waits_as_its_formula_says(p: int) -> None:
    times = StageTimes(forward_s=1.0, backward_input_s=1.25, backward_weight_s=0.75)
    for m in (p, 2 * p, 2 * p + 1):
        found = run("zb-h1", p, m, 1, times)
        for s in range(p):
            waited = found.makespan_s - found.busy_s(s)
            assert waited == pytest.approx((p - 1) * (1.0 + 1.25 - 0.75))
            assert found.activation_micro_batches[s] == p
        plain = run("1f1b", p, m, 1, times)
        assert plain.makespan_s - found.makespan_s == pytest.approx(2 * (p - 1) * 0.75)


def test_zero_bubble_has_no_closed_form_when_the_weights_take_longest() -> None:
    times = StageTimes(forward_s=1.0, backward_input_s=0.5, backward_weight_s=1.0)
    with pytest.raises(ScheduleError, match="simulate the schedule"):
        formulas.bubble_s("zb-h1", times, stages=3, micro_batches=6)
    assert run("zb-h1", 3, 6, 1, times).makespan_s > 6 * 2.5 + 2 * 0.5


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("global_norm", [False, True])
def test_slack_for_the_global_norm(p: int, global_norm: bool) -> None:
    for m in range(max(p - 1, 1), 2 * p + 1):
        for batches in (3, 5):
            found = run("2bw", p, m, batches, global_norm=global_norm)
            assert found.clip_slack_periods == pytest.approx(m - p + 1, abs=1e-9)
            assert found.clip_slack_s == pytest.approx((m - p + 1) * 0.06, abs=1e-9)


def test_slack_is_for_the_schedule_that_has_it() -> None:
    assert run("2bw", 2, 2, 2).clip_slack_s is None
    assert run("1f1b", 2, 2, 5).clip_slack_s is None


def test_a_global_norm_makes_pipedream_wait_but_not_2bw() -> None:
    assert run("pipedream", 4, 4, 5, global_norm=True).makespan_s > 1.05 * run("pipedream", 4, 4, 5).makespan_s
    plain, clipped = (run("2bw", 4, 4, 5, global_norm=norm, latency_s=0.003) for norm in (False, True))
    ends = [max(e.end_s for e in found.events if e.action.kind == "backward") for found in (plain, clipped)]
    assert ends[1] == pytest.approx(ends[0])
    assert clipped.makespan_s == pytest.approx(ends[1] + 0.003)  # the last update waits for the last norm


def test_messages_take_time_and_queue_on_their_link() -> None:
    link: dict[str, Any] = {"latency_s": 1.0, "bandwidth_bytes_per_s": 100.0, "message_bytes": 300}
    found = run("gpipe", 2, 3, 1, StageTimes(forward_s=1.0, backward_s=2.0), **link)
    starts = {(e.stage, e.action.kind, e.action.micro_batch): e.start_s for e in found.events}
    assert [starts[1, "forward", j] for j in range(3)] == [5.0, 8.0, 11.0]  # 1 + 3 + 1, then one transfer apart
    assert [starts[1, "backward", j] for j in range(3)] == [12.0, 14.0, 16.0]
    assert [starts[0, "backward", j] for j in range(3)] == [18.0, 21.0, 24.0]
    assert found.makespan_s == 26.0


def test_with_p_micro_batches_in_flight_a_latency_is_felt_in_every_round_of_p() -> None:
    plain, found = (run("2bw", 3, 6, 20, latency_s=latency).makespan_s for latency in (0.0, 0.001))
    rounds = 20 * 6 / 3
    assert found - plain == pytest.approx(4 * 0.001 * rounds, rel=0.05)
    with pytest.raises(ValueError, match="a bandwidth above 0"):
        run("2bw", 3, 6, 6, bandwidth_bytes_per_s=0.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    times = [TIMES, StageTimes(forward_s=0.04, backward_s=0.08), TIMES]
    found = run("2bw", 3, 6, 8, times)
    assert found.idle_share(1) < 0.1
    assert found.idle_share(0) == pytest.approx(1 - (1 - found.idle_share(1)) / 2)
    with pytest.raises(ValueError, match="2 StageTimes for 3 stages"):
        run("2bw", 3, 6, 8, times[:2])


def test_optimizer_time_is_work() -> None:
    times = StageTimes(forward_s=0.02, backward_s=0.04, optimizer_s=0.5)
    found = run("1f1b", 2, 4, 3, times)
    assert found.makespan_s == pytest.approx(3 * (5 * 0.06 + 0.5))
    assert found.busy_s(1) == pytest.approx(3 * (4 * 0.06 + 0.5))
    slack = run("2bw", 4, 8, 5, StageTimes(forward_s=0.02, backward_s=0.04, optimizer_s=0.01)).clip_slack_s
    assert slack is not None
    assert slack > 0.0


def test_memory_adds_versions_and_activations() -> None:
    found = run("2bw", 4, 4, 5)
    assert found.memory_bytes(0, weight_bytes=1000, activation_bytes=10) == 2 * 1000 + 4 * 10
    assert run("1f1b", 4, 4, 5).memory_bytes(0, weight_bytes=1000, activation_bytes=10) == 1000 + 4 * 10


def test_events_do_not_overlap_on_a_stage_and_follow_their_messages() -> None:
    found = run("zb-h1", 4, 6, 2, StageTimes(forward_s=1.0, backward_s=2.5), latency_s=0.25)
    for s in range(4):
        mine = [e for e in found.events if e.stage == s]
        assert [e.action for e in mine] == list(found.schedule.actions[s])
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
    ends = {(e.stage, e.action.kind, e.action.batch, e.action.micro_batch): e.end_s for e in found.events}
    for e in found.events:
        key = (e.action.batch, e.action.micro_batch)
        if e.action.kind == "forward" and e.stage > 0:
            assert e.start_s >= ends[e.stage - 1, "forward", *key] + 0.25
        if e.action.kind == "backward_input" and e.stage < 3:
            assert e.start_s >= ends[e.stage + 1, "backward_input", *key] + 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give backward_s, or both"),
        ({"backward_input_s": 1.0}, "give backward_s, or both"),
        ({"backward_s": 2.0, "backward_input_s": 1.0, "backward_weight_s": 2.0}, "not the sum of its halves"),
        ({"backward_s": 2.0, "optimizer_s": -1.0}, "optimizer_s=-1.0: times are finite and not negative"),
        ({"backward_s": 2.0, "backward_input_s": 3.0}, "backward_weight_s=-1.0"),
        ({"backward_s": math.inf}, "times are finite"),
    ],
)
def test_impossible_times_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageTimes(forward_s=1.0, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formulas.idle_share("dual", stages=2, micro_batches=2), "'dual' is not known"),  # type: ignore[arg-type]
        (lambda: formulas.idle_share("2bw", stages=0, micro_batches=2), "stages=0: give at least 1"),
        (lambda: formulas.gradient_delay("2bw", stage=2, stages=2, micro_batches=2), "the stages are 0 to 1"),
        (lambda: formulas.idle_share("1f1b", stages=2, micro_batches=2, chunks=2), "only 'interleaved' has several"),
    ],
)
def test_formulas_refuse_what_they_do_not_cover(call: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        call()


def test_delays_and_copies() -> None:
    for s in range(4):
        sizes = {"stage": s, "stages": 4}
        assert formulas.gradient_delay("2bw", micro_batches=4, **sizes) == 1
        assert formulas.gradient_delay("1f1b", micro_batches=4, **sizes) == 0
        assert formulas.gradient_delay("pipedream", micro_batches=1, **sizes) == 3 - s
        assert formulas.weight_copies("2bw", micro_batches=4, **sizes) == 2
    assert formulas.idle_share("2bw", stages=4, micro_batches=4) == 0.0
    assert formulas.ideal_speedup(stages=16, micro_batches=64) == pytest.approx(1.234, abs=5e-4)


def test_text_drawing() -> None:
    drawn = format_schedule(make_schedule("1f1b", stages=2, micro_batches=2, batches=1))
    assert drawn.splitlines() == [
        "stage 0  F0 F1 .  .  B0 == .  B1 ==",
        "weights  0  0  .  .  0  0  .  0  0",
        "stage 1  .  F0 B0 == F1 B1 == .  .",
        "weights  .  0  0  0  0  0  0  .  .",
    ]


# Limits for momentum averaged and read out plainly, then with Nesterov: synchronous, delayed, with error feedback.
LIMITS = {
    0.0: (2.00, 1.00, 0.618, 2.00, 1.00, 0.618),
    0.8: (18.0, 1.00, 1.79, 6.92, 1.72, 1.79),
    0.9: (38.0, 1.00, 2.70, 13.6, 2.53, 3.45),
    0.95: (78.0, 1.00, 4.00, 26.9, 3.75, 6.77),
    0.98: (198.0, 1.00, 6.58, 66.9, 6.26, 16.8),
}
RUNS = {"sync": (0, False), "delay": (1, False), "feedback": (1, True)}


@pytest.mark.parametrize("beta", LIMITS)
def test_stability_limits(beta: float) -> None:
    expected = iter(LIMITS[beta])
    for nesterov in (False, True):
        for delay, feedback in RUNS.values():
            found = stability_limit(beta, nesterov, delay, feedback)
            assert found == pytest.approx(next(expected), rel=5e-3)
            mode = Mode(beta=beta, nesterov=nesterov, delay=delay, error_feedback=feedback)
            assert mode.growth(0.999 * found) < 1 < mode.growth(1.001 * found)
    assert stability_limit(beta, delay=0) == pytest.approx(2 * (1 + beta) / (1 - beta), rel=1e-6)


@pytest.mark.parametrize(("nesterov", "delay", "feedback"), [(n, d, e) for n in (0, 1) for d, e in RUNS.values()])
def test_simulated_runs_turn_at_the_limit(nesterov: int, delay: int, feedback: bool) -> None:
    limit = stability_limit(0.8, bool(nesterov), delay, feedback)
    more: dict[str, Any] = {"nesterov": bool(nesterov), "delay": delay, "error_feedback": feedback, "steps": 3000}
    assert abs(simulate_quadratic(0.97 * limit, 0.8, **more)[-1]) < 1e-3
    assert abs(simulate_quadratic(1.03 * limit, 0.8, **more)[-1]) > 1e3


def test_the_noise_free_examples() -> None:
    end = {
        (kappa, run): abs(simulate_quadratic(kappa, 0.9, delay=delay, error_feedback=feedback)[-1])
        for kappa in (2.0, 3.3, 39.0)
        for run, (delay, feedback) in RUNS.items()
    }
    assert {key for key, value in end.items() if value < 1e-2} == {(2.0, "sync"), (2.0, "feedback"), (3.3, "sync")}
    assert end[3.3, "delay"] > 1e11
    assert end[3.3, "feedback"] > 1e5
    for kappa, feedback, converges in ((2.0, 0, True), (2.6, 0, False), (3.3, 1, True), (3.6, 1, False)):
        last = abs(simulate_quadratic(kappa, 0.9, nesterov=True, error_feedback=feedback)[-1])
        assert (last < 1e-2) == converges


SPREAD = {
    (0.1, 0.9): (0.051, 0.055, 0.051),
    (0.5, 0.9): (0.254, 0.510, 0.290),
    (0.9, 0.9): (0.459, 4.64, 0.611),
    (0.5, 0.0): (0.332, 0.599, 2.42),
}


@pytest.mark.parametrize(("kappa", "beta"), SPREAD)
def test_spread_under_noise(kappa: float, beta: float) -> None:
    for (delay, feedback), expected in zip(RUNS.values(), SPREAD[kappa, beta], strict=True):
        exact = stationary_second_moment(kappa, beta, delay=delay, error_feedback=feedback)
        assert exact == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("delay", "feedback", "nesterov"), [(0, 0.0, True), (1, 0.5, False), (2, 1.0, True)])
def test_spread_is_that_of_a_long_run(delay: int, feedback: float, nesterov: bool) -> None:
    more: dict[str, Any] = {"delay": delay, "error_feedback": feedback, "nesterov": nesterov}
    path = simulate_quadratic(0.3, 0.8, steps=100_000, noise=1.0, seed=5, **more)
    assert float(np.mean(path[1000:] ** 2)) == pytest.approx(stationary_second_moment(0.3, 0.8, **more), rel=0.05)
    assert stationary_second_moment(1e3, 0.8, **more) == math.inf


def test_the_first_steps_by_hand() -> None:
    path = simulate_quadratic(0.5, 0.0, delay=1, error_feedback=1.0, steps=4)
    # gradients 1, 1, 0.5, 0: updates 0.5, 0.5, 0.25, 0; applied 0.5, 0.5, 0, -0.25
    assert path.tolist() == [1.0, 0.5, 0.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": 1.0}, "beta=1.0: momentum"),
        ({"beta": 0.5, "delay": -1}, "delay=-1"),
        ({"beta": 0.5, "error_feedback": -0.5}, "error_feedback=-0.5"),
    ],
)
def test_modes_outside_their_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mode(**arguments)
