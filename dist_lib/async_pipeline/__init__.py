"""Pipelines that never drain: schedules, one step of gradient delay, error feedback, and their exact emulator.

A schedule is data (:func:`make_schedule`), checked (:func:`validate`), timed (:func:`simulate`) and drawn
(:func:`format_schedule`; in colour by :mod:`dist_lib.async_pipeline.figures`, which needs plotly and so is imported on
its own). :mod:`~dist_lib.async_pipeline.formulas` has the closed forms, :mod:`~dist_lib.async_pipeline.quadratic` the
smallest problem on which the delay can be understood. :class:`Pipeline` runs the never-flushed schedule on many
processes, :class:`DelayedTrainer` does the same arithmetic in one, and :class:`ErrorFeedback` wraps any optimizer.
"""

from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.drawing import format_schedule
from dist_lib.async_pipeline.emulator import DelayedTrainer
from dist_lib.async_pipeline.error_feedback import ErrorFeedback
from dist_lib.async_pipeline.mesh import PipelineError, PipelineMesh
from dist_lib.async_pipeline.quadratic import simulate_quadratic, stability_limit, stationary_second_moment
from dist_lib.async_pipeline.runtime import Pipeline
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
from dist_lib.async_pipeline.stages import Tie, split_decoder
from dist_lib.async_pipeline.validation import ScheduleReport, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "AsyncConfig",
    "DelayedTrainer",
    "ErrorFeedback",
    "Event",
    "Pipeline",
    "PipelineError",
    "PipelineMesh",
    "Schedule",
    "ScheduleError",
    "ScheduleReport",
    "Simulation",
    "StageTimes",
    "Tie",
    "format_schedule",
    "make_schedule",
    "simulate",
    "simulate_quadratic",
    "split_decoder",
    "stability_limit",
    "stationary_second_moment",
    "validate",
    "version_of",
]
