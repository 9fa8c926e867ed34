"""When each action of a schedule runs, given how long things take.

Event by event: an action starts when its stage is free and its message has arrived. Messages leave when the action
that made them ends, share a link (one for each pair of stages and direction) in order, and overlap with compute, as
the runtime's do. Nothing is computed and no process is started; see :mod:`~dist_lib.async_pipeline.formulas` for the
closed forms that the results must equal where those apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dist_lib.async_pipeline.schedules import Action, Event, Schedule
from dist_lib.async_pipeline.validation import ScheduleReport, awaited, produced, validate, walk


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """How long the work of one micro-batch takes on one stage, all its chunks together, in seconds.

    Attributes:
        forward_s: the forward.
        backward_s: the whole backward; with both halves given, their sum.
        backward_input_s: the half that yields the gradient for the previous stage; default: ``backward_s`` less the
            other half, or half of it.
        backward_weight_s: the half that yields the weights' gradients; likewise.
        optimizer_s: one update.

    Raises:
        ValueError: a negative or infinite time, no backward at all, or halves that do not add up to the whole.
    """

    forward_s: float
    backward_s: float | None = None
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        whole, first, second = self.backward_s, self.backward_input_s, self.backward_weight_s
        if whole is None:
            if first is None or second is None:
                raise ValueError("give backward_s, or both backward_input_s and backward_weight_s")
            whole = first + second
        if first is None:
            first = whole - second if second is not None else whole / 2
        if second is None:
            second = whole - first
        for name, value in (
            ("backward_s", whole),
            ("backward_input_s", first),
            ("backward_weight_s", second),
            ("forward_s", self.forward_s),
            ("optimizer_s", self.optimizer_s),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: times are finite and not negative")
            object.__setattr__(self, name, float(value))
        if not math.isclose(first + second, whole, rel_tol=1e-9, abs_tol=1e-15):
            raise ValueError(f"backward_s={whole} is not the sum of its halves {first} and {second}; leave one out")

    def of(self, action: Action, chunks: int) -> float:
        """Seconds that an action takes on a stage with ``chunks`` chunks."""
        if action.kind == "update":
            return self.optimizer_s
        return float(getattr(self, f"{action.kind}_s")) / chunks

    @property
    def period_s(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_s + float(self.backward_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A schedule in time.

    Attributes:
        schedule: what was simulated.
        events: every action with its start and end, by start.
        makespan_s: from the first start to the last end.
        live_versions: weight versions held at most, by stage.
        activation_micro_batches: micro-batches whose activations are held at most, by stage, each counted with all of
            the stage's layers: an interleaved chunk counts ``1 / v``.
        clip_slack_s: for ``2bw`` with at least three batches, the least time between the end of a batch's last
            backward on any stage, when its global gradient norm can be known, and the moment at which some stage must
            begin the update that needs it; None otherwise.
        clip_slack_periods: the same in forward-plus-backward times of the slowest stage.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    makespan_s: float
    live_versions: tuple[int, ...]
    activation_micro_batches: tuple[float, ...]
    clip_slack_s: float | None
    clip_slack_periods: float | None

    def busy_s(self, stage: int) -> float:
        """Seconds in which a stage computes."""
        return sum(e.end_s - e.start_s for e in self.events if e.stage == stage)

    def idle_share(self, stage: int) -> float:
        """The share of the whole run in which a stage does not compute, fill and drain included."""
        return 1.0 - self.busy_s(stage) / self.makespan_s if self.makespan_s else 0.0

    def memory_bytes(self, stage: int, *, weight_bytes: int, activation_bytes: int) -> float:
        """Weights and activations that a stage holds at most (their two peaks added).

        Args:
            stage: which stage.
            weight_bytes: bytes of one version of the stage's weights.
            activation_bytes: bytes that one micro-batch leaves for the backward, over all layers of the stage.
        """
        return self.live_versions[stage] * weight_bytes + self.activation_micro_batches[stage] * activation_bytes


def simulate(
    schedule: Schedule,
    times: StageTimes | Sequence[StageTimes],
    *,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float = math.inf,
    message_bytes: int = 0,
    global_norm: bool = False,
) -> Simulation:
    """Validate a schedule and run it in simulated time.

    Args:
        schedule: from :func:`~dist_lib.async_pipeline.make_schedule`, or your own.
        times: the same for all stages, or one for each.
        latency_s: from the end of a transfer to its arrival.
        bandwidth_bytes_per_s: of each link in each direction.
        message_bytes: size of an activation, and of its gradient.
        global_norm: let every update wait until all stages have finished the batch's backwards (and one
            latency more, with more than one stage), as clipping by the global norm needs. A flushed pipeline starts
            its next batch after that; ``2bw`` updates late enough not to notice when ``m >= p``.

    Raises:
        ScheduleError: an invalid schedule, or a deadlock because of ``global_norm``.
        ValueError: another number of times than stages, or a negative or impossible link.
    """
    report = validate(schedule)
    given = [times] * schedule.stages if isinstance(times, StageTimes) else list(times)
    if len(given) != schedule.stages:
        raise ValueError(f"{len(given)} StageTimes for {schedule.stages} stages: give one, or one for each")
    if not (latency_s >= 0 and math.isfinite(latency_s) and bandwidth_bytes_per_s > 0 and message_bytes >= 0):
        raise ValueError(
            f"latency_s={latency_s}, bandwidth_bytes_per_s={bandwidth_bytes_per_s}, message_bytes={message_bytes}: "
            "give a finite latency and a size of at least 0, and a bandwidth above 0"
        )
    clock = _Clock(schedule, given, latency_s, message_bytes / bandwidth_bytes_per_s, global_norm)
    events = clock.run(report)
    slack = _clip_slack(schedule, given, events)
    period = max(t.period_s for t in given)
    return Simulation(
        schedule=schedule,
        events=tuple(events),
        makespan_s=max(e.end_s for e in events),
        live_versions=report.live_versions,
        activation_micro_batches=tuple(n / schedule.chunks for n in report.in_flight),
        clip_slack_s=slack,
        clip_slack_periods=slack / period if slack is not None and period else None,
    )


class _Clock:
    """The state of a simulation: when stages and links are free, and when messages arrive."""

    def __init__(
        self, schedule: Schedule, times: Sequence[StageTimes], latency_s: float, transfer_s: float, global_norm: bool
    ) -> None:
        self.schedule, self.times, self.global_norm = schedule, times, global_norm
        self.latency_s, self.transfer_s = latency_s, transfer_s
        self.free = [0.0] * schedule.stages
        self.link_free: dict[tuple[int, int], float] = {}
        self.arrival: dict[tuple[str, int, int, int], float] = {}
        self.finished = [[0.0] * schedule.batches for _ in range(schedule.stages)]
        self.updated = [0.0] * schedule.batches

    def run(self, report: ScheduleReport) -> list[Event]:
        events = []
        order = walk(self.schedule, joint_updates=True) if self.global_norm else report.order
        for action in order:
            start = max(self.free[action.stage], self._ready(action))
            end = start + self.times[action.stage].of(action, self.schedule.chunks)
            self.free[action.stage] = end
            self._finish(action, end)
            events.append(Event(stage=action.stage, action=action, start_s=start, end_s=end))
        return sorted(events, key=lambda e: (e.start_s, e.stage, e.end_s))

    def _ready(self, action: Action) -> float:
        if action.kind == "update":
            if not self.global_norm:
                return 0.0
            known = max(row[action.batch] for row in self.finished)
            return known + (self.latency_s if self.schedule.stages > 1 else 0.0)
        message = awaited(action, self.schedule)
        return self.arrival[message] if message is not None else 0.0

    def _finish(self, action: Action, end: float) -> None:
        if action.kind not in ("forward", "update"):
            row = self.finished[action.stage]
            row[action.batch] = max(row[action.batch], end)
        sent = produced(action, self.schedule)
        if sent is None:
            return
        receiver, message = sent
        if receiver == action.stage:
            self.arrival[message] = end
            return
        gone = max(end, self.link_free.get((action.stage, receiver), 0.0)) + self.transfer_s
        self.link_free[action.stage, receiver] = gone
        self.arrival[message] = gone + self.latency_s


def _clip_slack(schedule: Schedule, times: Sequence[StageTimes], events: Sequence[Event]) -> float | None:
    if schedule.name != "2bw" or schedule.batches < 3:
        return None
    known = [0.0] * schedule.batches
    needed = [math.inf] * schedule.batches  # when the update that a batch makes must begin
    for event in events:
        action = event.action
        if action.kind == "backward":
            known[action.batch] = max(known[action.batch], event.end_s)
        elif action.kind == "forward" and action.micro_batch == 0 and action.batch >= 2:
            latest = event.start_s - times[event.stage].optimizer_s
            needed[action.batch - 2] = min(needed[action.batch - 2], latest)
    return min(needed[g] - known[g] for g in range(schedule.batches - 2))
