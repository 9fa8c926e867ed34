"""The pictures hold what was simulated, say it in words, and show one combination of their controls at a time."""

from __future__ import annotations

from typing import Any

import pytest

from dist_lib.async_pipeline import (
    Event,
    ScheduleError,
    StageTimes,
    make_schedule,
    simulate,
    stability_limit,
    stationary_second_moment,
)
from dist_lib.async_pipeline.figures import NAMES, idle_figure, schedule_explorer, schedule_figure
from dist_lib.async_pipeline.quadratic_figures import noise_figure, stability_figure, trajectory_figure

TIMES = StageTimes(forward_s=0.02, backward_s=0.04)


def boxes(fig: Any) -> list[tuple[str, float, float, str, tuple[int, ...]]]:
    return [
        (row, start, length, trace.name, tuple(data))
        for trace in fig.data
        if trace.type == "bar" and trace.customdata is not None
        for row, start, length, data in zip(trace.y, trace.base, trace.x, trace.customdata, strict=True)
    ]


def test_a_simulation_and_its_events_give_the_same_boxes() -> None:
    found = simulate(make_schedule("2bw", stages=3, micro_batches=3, batches=3), TIMES)
    fig = schedule_figure(found, unit_s=1e-3, unit="ms")
    shifted = [Event(e.stage, e.action, e.start_s + 5.0, e.end_s + 5.0) for e in found.events]
    assert boxes(schedule_figure(shifted, unit_s=1e-3, unit="ms")) == boxes(fig)
    assert len(boxes(fig)) == 3 * 3 * 3 * 2
    assert ("stage 1", 20.0, 20.0, "forward", (0, 0, 0)) in boxes(fig)
    assert "3 rows" in fig.layout.meta["alt"]
    assert "up to 1 update old" in fig.layout.meta["alt"]
    assert fig.layout.xaxis.title.text == "time (ms)"


def test_versions_differ_in_their_hatching_and_are_explained() -> None:
    found = simulate(make_schedule("gpipe", stages=2, micro_batches=2, batches=3), TIMES)
    fig = schedule_figure(found)
    shapes: dict[int, set[str]] = {}
    for trace in fig.data:
        if trace.customdata is not None:
            for data, shape in zip(trace.customdata, trace.marker.pattern.shape, strict=True):
                shapes.setdefault(data[2], set()).add(shape)
    assert [len(s) for s in shapes.values()] == [1, 1, 1]
    assert len({next(iter(s)) for s in shapes.values()}) == 3
    assert [t.name for t in fig.data if t.customdata is None] == [f"on weights W({v})" for v in range(3)]
    assert "on the newest weights" in fig.layout.meta["alt"]


def test_updates_are_drawn_when_they_take_time() -> None:
    slow = StageTimes(forward_s=0.02, backward_s=0.04, optimizer_s=0.01)
    fig = schedule_figure(simulate(make_schedule("1f1b", stages=2, micro_batches=2, batches=2), slow))
    assert sum(box[3] == "update" for box in boxes(fig)) == 4


@pytest.mark.parametrize(("events", "unit"), [([], 1.0), (None, 0.0)])
def test_nothing_to_draw_is_refused(events: list[Event] | None, unit: float) -> None:
    found = simulate(make_schedule("1f1b", stages=2, micro_batches=2, batches=1), TIMES)
    with pytest.raises(ValueError, match="at least one event and a positive unit"):
        schedule_figure(found if events is None else events, unit_s=unit)


def test_the_explorer_shows_one_schedule_and_stays_small() -> None:
    fig = schedule_explorer()
    shown = [t for t in fig.data if t.visible and isinstance(t.meta, dict)]
    assert {tuple(t.meta.items()) for t in shown} == {
        (("stages", 4), ("micro_batches", 4), ("schedule", NAMES["1f1b"]))
    }
    assert {c["key"] for c in fig.layout.meta["controls"]} == {"stages", "micro_batches", "schedule"}
    assert len({tuple(t.meta.items()) for t in fig.data if isinstance(t.meta, dict)}) == 2 * 2 * 6
    assert len(fig.to_json()) < 200_000
    ends = {t.meta["schedule"]: t.x[0] for t in fig.data if t.type == "scatter" and t.meta["stages"] == 4}
    assert ends[NAMES["2bw"]] == (3 * 8 + 3) * 3.0
    assert ends[NAMES["1f1b"]] == 3 * (8 + 3) * 3.0


def test_the_explorer_refuses_what_does_not_exist() -> None:
    with pytest.raises(ScheduleError, match="2bw with 4 micro-batches on 8 stages"):
        schedule_explorer(stages=(2, 8), micro_batches=(4, 8), schedules=("1f1b", "2bw"))


def test_idle_shares_are_the_formulas() -> None:
    fig = idle_figure(stages=(2, 4), most=16)
    curve = next(t for t in fig.data if t.meta == {"stages": 4} and t.name == "GPipe and 1F1B")
    assert list(curve.x) == [4, 8, 12, 16]
    assert curve.y[0] == pytest.approx(3 / 7, abs=1e-5)
    with pytest.raises(ValueError, match="give most=32 or more"):
        idle_figure(stages=(2, 32), most=16)


def test_the_quadratic_figures() -> None:
    limits = stability_figure([0.5, 0.9])
    assert [t.visible for t in limits.data] == [True] * 3 + [False] * 3
    assert limits.data[5].y[1] == pytest.approx(stability_limit(0.9, True, 1, 1.0), rel=1e-4)
    paths = trajectory_figure(kappas=(0.5, 2.0), betas=(0.0, 0.9))
    assert len(paths.data) == 2 * 2 * 2 * 3
    assert sum(bool(t.visible) for t in paths.data) == 3
    assert "delay 1 has diverged" in paths.layout.meta["alt"]
    spread = noise_figure((0.0, 0.9))
    assert [c["key"] for c in spread.layout.meta["controls"]] == ["beta"]
    at = dict(zip(spread.data[3].x, spread.data[3].y, strict=True))
    assert at[0.5] == pytest.approx(stationary_second_moment(0.5, 0.9, delay=0), rel=1e-4)
