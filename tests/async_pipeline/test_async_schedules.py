"""Schedules: the version oracle over a grid, what validation counts, and planted faults that it must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_lib.async_pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    formulas,
    make_schedule,
    validate,
    version_of,
)
from dist_lib.async_pipeline.schedules import _never_flushed

GRID = [(p, m) for p in range(2, 9) for m in range(p - 1, 2 * p + 1)]
STEADY = 5  # batches after which every pipeline of the grid is full


def two_versions(p: int, m: int, batches: int = STEADY) -> Schedule:
    return make_schedule("2bw", stages=p, micro_batches=m, batches=batches, allow_edge=True)


def unchecked(p: int, m: int, batches: int = STEADY) -> Schedule:
    """The same order with any m, without the refusal of ``make_schedule``."""
    rows = tuple(_never_flushed(s, p, m, batches, name="2bw", lazy=True) for s in range(p))
    return replace(two_versions(p, p, batches), micro_batches=m, actions=rows)


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, 7))
    m = draw(st.integers(1, 12))
    if name == "interleaved":
        m = p * (1 + m % 3)
    if name == "2bw":
        m = max(m, p - 1, 1)
    chunks = draw(st.integers(1, 3)) if name == "interleaved" else 1
    return make_schedule(
        name, stages=p, micro_batches=m, batches=draw(st.integers(1, 4)), chunks=chunks, allow_edge=True
    )


@pytest.mark.parametrize(("p", "m"), GRID)
def test_every_stage_runs_batch_g_on_the_version_before_last_and_holds_two(p: int, m: int) -> None:
    schedule = two_versions(p, m)
    report = validate(schedule)
    for s, row in enumerate(schedule.actions):
        made = 0
        for action in row:
            if action.kind == "update":
                made += 1
                continue
            assert action.version == max(action.batch - 1, 0)
            assert action.version <= made, "a version before it exists"
            assert action.version >= made - 1, "a version older than the two that are kept"
        assert made == STEADY
        assert report.in_flight[s] == min(p - s, m * STEADY) <= p - s
        assert report.delays[s] == 1
    assert max(report.live_versions) == 2


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(3, 9) for m in range(1, p - 1)])
def test_fewer_micro_batches_ask_for_a_version_that_does_not_exist(p: int, m: int) -> None:
    with pytest.raises(ScheduleError, match=f"give at least {p - 1} micro-batches"):
        two_versions(p, m)
    with pytest.raises(ScheduleError, match=r"update of batch 0 .* comes after \d+ of \d+ backwards"):
        validate(unchecked(p, m, batches=3))


def test_the_unchecked_order_is_fine_at_the_bound() -> None:
    for p in range(2, 9):
        validate(unchecked(p, p - 1))


def test_the_edge_must_be_asked_for() -> None:
    with pytest.raises(ScheduleError, match=r"give at least 4 micro-batches \(3 works too"):
        make_schedule("2bw", stages=4, micro_batches=3, batches=2)
    assert make_schedule("2bw", stages=4, micro_batches=4, batches=2).micro_batches == 4


@settings(max_examples=60, deadline=None)
@given(any_schedule())
def test_any_schedule_is_valid_and_needs_what_the_formulas_say(schedule: Schedule) -> None:
    report = validate(schedule)
    p, m, batches, v = schedule.stages, schedule.micro_batches, schedule.batches, schedule.chunks
    parts = 3 if schedule.name == "zb-h1" else 2
    assert sum(map(len, schedule.actions)) == len(report.order) == p * batches * (m * v * parts + 1)
    for s in range(p):
        held = formulas.activation_micro_batches(
            schedule.name, stage=s, stages=p, micro_batches=m, batches=batches, chunks=v
        )
        assert report.in_flight[s] == pytest.approx(held * v)
        copies = formulas.weight_copies(schedule.name, stage=s, stages=p, micro_batches=m)
        assert report.live_versions[s] <= copies
        assert report.delays[s] <= formulas.gradient_delay(schedule.name, stage=s, stages=p, micro_batches=m)


@pytest.mark.parametrize("p", range(1, 7))
def test_pipedream_lags_and_stashes_by_stage(p: int) -> None:
    report = validate(make_schedule("pipedream", stages=p, micro_batches=1, batches=3 * p))
    assert report.delays == tuple(p - 1 - s for s in range(p))
    assert report.live_versions == tuple(p - s for s in range(p))
    assert report.in_flight == tuple(p - s for s in range(p))
    for s in range(p):
        assert formulas.weight_copies("pipedream", stage=s, stages=p, micro_batches=1) == p - s


def test_the_order_of_the_report_respects_every_dependency() -> None:
    seen: set[tuple[str, int, int, int]] = set()
    for action in validate(make_schedule("1f1b", stages=4, micro_batches=5, batches=2)).order:
        j = (action.batch, action.micro_batch)
        if action.kind == "forward" and action.stage > 0:
            assert ("forward", action.stage - 1, *j) in seen
        if action.kind == "backward":
            assert ("forward", action.stage, *j) in seen
            assert action.stage == 3 or ("backward", action.stage + 1, *j) in seen
        seen.add((action.kind, action.stage, *j))


def test_interleaved_visits_chunks_in_groups_of_p() -> None:
    row = make_schedule("interleaved", stages=2, micro_batches=4, batches=1, chunks=2).actions[0]
    forwards = [(a.micro_batch, a.chunk) for a in row if a.kind == "forward"]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backwards = [(a.micro_batch, a.chunk) for a in row if a.kind == "backward"]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert [a.kind for a in row][:5] == ["forward"] * 5  # 2 (p - 1) + (v - 1) p ahead, and one more


Row = list[Action]


def planted(name: str, change: Callable[[list[Row]], None], *, stages: int = 3, batches: int = 3) -> Schedule:
    schedule = make_schedule(name, stages=stages, micro_batches=4, batches=batches)  # type: ignore[arg-type]
    rows = [list(row) for row in schedule.actions]
    change(rows)
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def find(row: Row, kind: str, batch: int, micro_batch: int = 0) -> int:
    return next(i for i, a in enumerate(row) if (a.kind, a.batch, a.micro_batch) == (kind, batch, micro_batch))


def newest_in_forward(rows: list[Row]) -> None:
    for kind in ("forward", "backward"):
        i = find(rows[0], kind, 2, 1)
        rows[0][i] = replace(rows[0][i], version=2)


def newest_in_backward(rows: list[Row]) -> None:
    i = find(rows[1], "backward", 2, 3)
    rows[1][i] = replace(rows[1][i], version=2)


def dropped_backward(rows: list[Row]) -> None:
    del rows[1][find(rows[1], "backward", 0, 2)]


def doubled_forward(rows: list[Row]) -> None:
    rows[1].insert(0, rows[1][0])


def backward_first(rows: list[Row]) -> None:
    rows[2][0], rows[2][1] = rows[2][1], rows[2][0]


def no_warm_up(rows: list[Row]) -> None:
    rows[0].insert(1, rows[0].pop(find(rows[0], "backward", 0, 0)))


def swapped_on_one_stage(rows: list[Row]) -> None:
    i, j = find(rows[0], "forward", 0, 1), find(rows[0], "forward", 0, 2)
    rows[0][i], rows[0][j] = rows[0][j], rows[0][i]


def swapped_at_the_end(rows: list[Row]) -> None:
    i, j = find(rows[2], "backward", 0, 1), find(rows[2], "backward", 0, 2)
    k = find(rows[2], "forward", 0, 2)
    rows[2][i], rows[2][j] = rows[2][j], rows[2][i]
    rows[2].insert(i, rows[2].pop(k))


def early_update(rows: list[Row]) -> None:
    i = find(rows[0], "update", 0)
    rows[0].insert(find(rows[0], "backward", 0, 3), rows[0].pop(i))


def late_update(rows: list[Row]) -> None:
    i = find(rows[0], "update", 0)
    rows[0].insert(find(rows[0], "forward", 2, 1), rows[0].pop(i))


def no_update(rows: list[Row]) -> None:
    del rows[2][find(rows[2], "update", 1)]


def swapped_updates(rows: list[Row]) -> None:
    i, j = find(rows[2], "update", 1), find(rows[2], "update", 2)
    rows[2][i], rows[2][j] = rows[2][j], rows[2][i]


def weights_first(rows: list[Row]) -> None:
    i, j = find(rows[0], "backward_input", 0), find(rows[0], "backward_weight", 0)
    rows[0][i], rows[0][j] = rows[0][j], rows[0][i]


def half_only(rows: list[Row]) -> None:
    del rows[2][find(rows[2], "backward_weight", 0, 1)]


def wrong_row(rows: list[Row]) -> None:
    rows[0][0] = replace(rows[0][0], stage=1)


FAULTS: list[tuple[str, Callable[[list[Row]], None], str]] = [
    ("2bw", newest_in_forward, "stage 0: forward of batch 2, micro-batch 1 on version 2 should run on version 1"),
    (
        "2bw",
        newest_in_backward,
        "stage 1: backward of batch 2, micro-batch 3 on version 2 comes after a forward on ver",
    ),
    ("1f1b", dropped_backward, "stage 1: batch 0, micro-batch 2 has 0 whole backwards"),
    ("1f1b", doubled_forward, "stage 1: batch 0, micro-batch 0 has 2 forwards, not 1"),
    ("1f1b", backward_first, "stage 2: backward of batch 0, micro-batch 0 on version 0 comes before its forward"),
    ("1f1b", no_warm_up, "deadlock: stage 0 waits for stage 1 before its backward of batch 0, micro-batch 0"),
    (
        "1f1b",
        swapped_on_one_stage,
        "stage 0: forward of batch 0, micro-batch 1 .* comes after batch 0, micro-batch 2. Grad",
    ),
    ("1f1b", swapped_at_the_end, "stage 2: backward of batch 0, micro-batch 1 .* Gradients are added in ascending"),
    ("2bw", early_update, r"stage 0: update of batch 0 \(makes version 1\) comes after 3 of 4 backwards"),
    ("2bw", late_update, "stage 0: forward of batch 2, micro-batch 0 on version 1 comes when the newest is version 0"),
    ("2bw", no_update, "stage 2: batch 1 is updated 0 times"),
    ("2bw", swapped_updates, r"stage 2: update of batch 2 \(makes version 3\) comes while the newest is version 1"),
    ("zb-h1", weights_first, "stage 0: backward_weight of batch 0, .* comes before the half for the inputs"),
    ("zb-h1", half_only, "stage 2: batch 0, micro-batch 1 has 0 whole backwards and 1 and 0 halves"),
    ("gpipe", wrong_row, "stage 0: .* does not belong here"),
]


@pytest.mark.parametrize(("name", "fault", "message"), FAULTS, ids=[f.__name__ for _, f, _ in FAULTS])
def test_a_planted_fault_is_named(name: str, fault: Callable[[list[Row]], None], message: str) -> None:
    validate(planted(name, lambda rows: None))
    with pytest.raises(ScheduleError, match=message):
        validate(planted(name, fault))


def test_a_message_for_another_chunk_is_noticed() -> None:
    schedule = make_schedule("interleaved", stages=2, micro_batches=4, batches=1, chunks=2)
    row = list(schedule.actions[1])
    i, j = (next(k for k, a in enumerate(row) if (a.micro_batch, a.chunk) == wanted) for wanted in ((1, 0), (0, 1)))
    row[i], row[j] = row[j], row[i]
    message = (
        "stage 1: forward of batch 0, micro-batch 0, chunk 1 on version 0 would receive the activation of batch 0, "
        "micro-batch 1, because stage 0 sends that first"
    )
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, actions=(schedule.actions[0], tuple(row))))


def test_a_row_too_few_is_refused() -> None:
    schedule = make_schedule("gpipe", stages=2, micro_batches=2, batches=1)
    with pytest.raises(ScheduleError, match="1 rows of actions for 2 stages"):
        validate(replace(schedule, actions=schedule.actions[:1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "dualpipe"}, "'dualpipe' is not known; choose one of gpipe, 1f1b"),
        ({"stages": 0}, "stages=0: give a whole number of at least 1"),
        ({"micro_batches": 2.0}, "micro_batches=2.0: give a whole number"),
        ({"batches": True}, "batches=True: give a whole number"),
        ({"chunks": 2}, "only 'interleaved' places several chunks"),
        ({"name": "interleaved", "micro_batches": 6, "chunks": 2}, "give a multiple of 4"),
        ({"name": "2bw", "micro_batches": 2, "allow_edge": True}, "give at least 3 micro-batches or fewer stages"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"name": "1f1b", "stages": 4, "micro_batches": 4, "batches": 2} | arguments
    with pytest.raises(ScheduleError, match=message):
        make_schedule(**sizes)  # type: ignore[arg-type]


def test_one_stage_still_lags_by_one() -> None:
    schedule = make_schedule("2bw", stages=1, micro_batches=1, batches=4)
    assert [a.version for a in schedule.actions[0] if a.kind == "forward"] == [0, 0, 1, 2]
    assert [version_of(g) for g in range(4)] == [0, 0, 1, 2]
    assert validate(schedule).delays == (1,)
