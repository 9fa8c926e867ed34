"""Pipelines that never drain: schedules, one step of gradient delay, error feedback, and their exact emulator.

A schedule is data (:func:`make_schedule`), checked (:func:`validate`), timed (:func:`simulate`) and drawn
(:func:`format_schedule`; in colour by :mod:`dist_lib.async_pipeline.figures`, which needs plotly and so is imported on
its own). :mod:`~dist_lib.async_pipeline.formulas` has the closed forms, :mod:`~dist_lib.async_pipeline.quadratic` the
smallest problem on which the delay can be understood.
"""

from dist_lib.async_pipeline.drawing import format_schedule
from dist_lib.async_pipeline.quadratic import simulate_quadratic, stability_limit, stationary_second_moment
from dist_lib.async_pipeline.schedules import (
    SCHEDULES,
    Action,
    Event,
    Schedule,
    ScheduleError,
    make_schedule,
    version_of,
)
from dist_lib.async_pipeline.simulator import Simulation, StageTimes, simulate
from dist_lib.async_pipeline.validation import ScheduleReport, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Event",
    "Schedule",
    "ScheduleError",
    "ScheduleReport",
    "Simulation",
    "StageTimes",
    "format_schedule",
    "make_schedule",
    "simulate",
    "simulate_quadratic",
    "stability_limit",
    "stationary_second_moment",
    "validate",
    "version_of",
]
