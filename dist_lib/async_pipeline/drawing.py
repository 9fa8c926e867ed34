"""Schedules as text: a row for each stage, a column for each unit of time, and the weights used below it.

For a terminal, a test's message or an exercise; :mod:`~dist_lib.async_pipeline.figures` draws the same in colour.
"""

from __future__ import annotations

from dist_lib.async_pipeline.schedules import Event, Schedule
from dist_lib.async_pipeline.simulator import StageTimes, simulate

LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}


def format_schedule(schedule: Schedule, *, forward: int = 1, backward: int = 2, versions: bool = True) -> str:
    """Draw a schedule in text.

    ``F3`` is the forward of the micro-batch that comes fourth in the run, ``B3`` its backward (the half for the inputs
    in a split backward, then ``W3`` for the weights), ``==`` work that goes on, ``.`` waiting. A letter after the
    number tells the chunk (``a`` is the first) when a stage has several. Updates take no time and are not shown; they
    are visible in the second line of each stage, which gives the version of the weights at work.

    Args:
        schedule: a valid schedule.
        forward, backward: columns that a forward and a whole backward take (of one chunk, if there are several).
        versions: write the line of versions too.

    Returns:
        Lines joined by newlines, without one at the end.

    Raises:
        ScheduleError: an invalid schedule.
        ValueError: a width below 1, or an odd ``backward`` for a split one.
    """
    split = any(a.kind == "backward_weight" for row in schedule.actions for a in row)
    if forward < 1 or backward < 1 or (split and backward % 2):
        raise ValueError(
            f"forward={forward}, backward={backward}: give at least 1, and an even backward if it is split"
        )
    times = StageTimes(forward_s=float(forward * schedule.chunks), backward_s=float(backward * schedule.chunks))
    simulation = simulate(schedule, times)
    columns = round(simulation.makespan_s)
    width = 1 + max(len(_label(schedule, e)) for e in simulation.events)
    lines, margin = [], len(f"stage {schedule.stages - 1}") + 2
    for stage in range(schedule.stages):
        work, weights = ["."] * columns, ["."] * columns
        for event in simulation.events:
            if event.stage == stage and event.action.kind != "update":
                first, end = round(event.start_s), round(event.end_s)
                work[first:end] = [_label(schedule, event), *["=" * (width - 1)] * (end - first - 1)]
                weights[first:end] = [str(event.action.version)] * (end - first)
        lines.append(f"stage {stage}".ljust(margin) + "".join(cell.ljust(width) for cell in work).rstrip())
        if versions:
            lines.append("weights".ljust(margin) + "".join(cell.ljust(width) for cell in weights).rstrip())
    return "\n".join(lines)


def _label(schedule: Schedule, event: Event) -> str:
    action = event.action
    if action.kind == "update":
        return ""
    chunk = chr(ord("a") + action.chunk) if schedule.chunks > 1 else ""
    return f"{LETTERS[action.kind]}{action.batch * schedule.micro_batches + action.micro_batch}{chunk}"
