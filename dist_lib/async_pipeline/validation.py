"""Check a schedule by executing its dependencies, without computing anything.

The rules are those of the runtime: messages between two stages arrive in the order in which they were sent, sends do
not block, receives do. :func:`walk` runs the stages as far as their inputs allow and notices a deadlock; and
:func:`validate` also follows every weight version and every held micro-batch. Nothing here knows about time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dist_lib.async_pipeline.schedules import KINDS, Action, Schedule, ScheduleError, expected_version

BACKWARDS = ("backward", "backward_input")
"""The kinds of action that send a gradient to the previous stage."""


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """What a valid schedule needs on each stage.

    Attributes:
        schedule: what was checked.
        live_versions: for each stage, the most weight versions held at once: the newest, and those still to be used.
        in_flight: for each stage, the most activations held at once, one for each micro-batch and chunk whose
            forward has run and whose (last) backward has not.
        delays: for each stage, the largest number of updates between the version a batch is computed on and the one
            that its own update is applied to.
        order: all actions in an order in which one process could run them.
    """

    schedule: Schedule
    live_versions: tuple[int, ...]
    in_flight: tuple[int, ...]
    delays: tuple[int, ...]
    order: tuple[Action, ...]


def source(action: Action, schedule: Schedule) -> int | None:
    """The stage whose message an action waits for; None when it needs none (or only its own stage's result)."""
    place, last = action.chunk * schedule.stages + action.stage, schedule.chunks * schedule.stages - 1
    if action.kind == "forward" and place > 0:
        return (place - 1) % schedule.stages
    if action.kind in BACKWARDS and place < last:
        return (place + 1) % schedule.stages
    return None


def awaited(action: Action, schedule: Schedule) -> tuple[str, int, int, int] | None:
    """The message an action consumes, as ``(direction, place in the model, batch, micro-batch)`` of its sender."""
    if source(action, schedule) is None:
        return None
    step = -1 if action.kind == "forward" else 1
    place = action.chunk * schedule.stages + action.stage + step
    return ("activation" if step < 0 else "gradient", place, action.batch, action.micro_batch)


def produced(action: Action, schedule: Schedule) -> tuple[int, tuple[str, int, int, int]] | None:
    """The message an action sends, as ``(receiving stage, message)``; None if it sends none."""
    place, last = action.chunk * schedule.stages + action.stage, schedule.chunks * schedule.stages - 1
    if action.kind == "forward" and place < last:
        return (place + 1) % schedule.stages, ("activation", place, action.batch, action.micro_batch)
    if action.kind in BACKWARDS and place > 0:
        return (place - 1) % schedule.stages, ("gradient", place, action.batch, action.micro_batch)
    return None


def walk(schedule: Schedule, *, joint_updates: bool = False) -> Iterator[Action]:
    """Yield all actions in an order in which their inputs exist, every stage's own order kept.

    Args:
        schedule: what to run.
        joint_updates: let an update wait for the backwards of its batch on all stages, as a global norm needs.

    Raises:
        ScheduleError: a stage receives another message than it needs, or no stage can go on.
    """
    queues: dict[tuple[int, int, str], deque[tuple[str, int, int, int]]] = {}
    next_at, waiting = [0] * schedule.stages, deque(range(schedule.stages))
    open_backwards = Counter(a.batch for row in schedule.actions for a in row if a.kind not in ("forward", "update"))
    idle_rounds = 0

    def ready(action: Action) -> bool:
        if action.kind == "update":
            return not (joint_updates and open_backwards[action.batch])
        return _receive(action, schedule, queues)

    while waiting and idle_rounds < len(waiting):
        stage = waiting.popleft()
        row, moved = schedule.actions[stage], False
        while next_at[stage] < len(row) and ready(row[next_at[stage]]):
            action = row[next_at[stage]]
            if action.kind not in ("forward", "update"):
                open_backwards[action.batch] -= 1
            sent = produced(action, schedule)
            if sent is not None:
                queues.setdefault((stage, sent[0], sent[1][0]), deque()).append(sent[1])
            next_at[stage] += 1
            moved = True
            yield action
        if next_at[stage] < len(row):
            waiting.append(stage)
        idle_rounds = 0 if moved else idle_rounds + 1
    if waiting:
        blocked = {s: schedule.actions[s][next_at[s]] for s in sorted(waiting)}
        senders = {s: source(action, schedule) for s, action in blocked.items()}
        stuck = "; ".join(
            f"stage {s} waits for {'all stages' if senders[s] is None else f'stage {senders[s]}'} before its {action}"
            for s, action in blocked.items()
        )
        raise ScheduleError(f"deadlock: {stuck}. Give the stages orders that agree")


def _receive(
    action: Action, schedule: Schedule, queues: Mapping[tuple[int, int, str], deque[tuple[str, int, int, int]]]
) -> bool:
    """Take the action's message off its channel; False if it has not been sent yet."""
    wanted, sender = awaited(action, schedule), source(action, schedule)
    if wanted is None or sender is None:
        return True
    queue = queues.get((sender, action.stage, wanted[0]))
    if not queue:
        return False
    if queue[0] != wanted:
        kind, _, batch, micro_batch = queue[0]
        raise ScheduleError(
            f"stage {action.stage}: {action} would receive the {kind} of batch {batch}, micro-batch {micro_batch}, "
            f"because stage {sender} sends that first. Give both stages the same order"
        )
    queue.popleft()
    return True


def validate(schedule: Schedule) -> ScheduleReport:
    """Check that a schedule computes what its name promises.

    Every micro-batch runs forward and backward once on every stage and chunk, in ascending order, both on the version
    that the schedule's rule names and that exists by then; every batch is updated once, in order, after its
    backwards; messages match and nothing deadlocks.

    Raises:
        ScheduleError: naming the stage, the action and what is wrong.
    """
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(f"{len(schedule.actions)} rows of actions for {schedule.stages} stages: give one for each")
    for stage, row in enumerate(schedule.actions):
        _check_shape(schedule, stage, row)
    ledgers = [_Ledger(schedule, s) for s in range(schedule.stages)]
    order = []
    for action in walk(schedule):
        ledgers[action.stage].enter(action)
        order.append(action)
    return ScheduleReport(
        schedule=schedule,
        live_versions=tuple(ledger.most_versions for ledger in ledgers),
        in_flight=tuple(ledger.most_held for ledger in ledgers),
        delays=tuple(ledger.delay for ledger in ledgers),
        order=tuple(order),
    )


def _check_shape(schedule: Schedule, stage: int, row: Sequence[Action]) -> None:
    """Every action belongs here, and each piece of work stands once."""
    counts: Counter[tuple[str, int, int, int]] = Counter()
    for action in row:
        inside = (
            action.kind in KINDS
            and action.stage == stage
            and 0 <= action.batch < schedule.batches
            and 0 <= action.micro_batch < schedule.micro_batches
            and 0 <= action.chunk < schedule.chunks
        )
        if not inside:
            raise ScheduleError(
                f"stage {stage}: {action!r} does not belong here: {schedule.batches} batches of "
                f"{schedule.micro_batches} micro-batches, {schedule.chunks} chunks, kinds {', '.join(KINDS)}"
            )
        counts[action.kind, action.chunk, action.batch, action.micro_batch] += 1
    for batch in range(schedule.batches):
        if counts["update", 0, batch, 0] != 1:
            raise ScheduleError(f"stage {stage}: batch {batch} is updated {counts['update', 0, batch, 0]} times, not 1")
        for chunk in range(schedule.chunks):
            for j in range(schedule.micro_batches):
                _check_work(stage, {kind: counts[kind, chunk, batch, j] for kind in KINDS[:-1]}, chunk, batch, j)


def _check_work(stage: int, times: Mapping[str, int], chunk: int, batch: int, micro_batch: int) -> None:
    where = f"stage {stage}: batch {batch}, micro-batch {micro_batch}" + (f", chunk {chunk}" if chunk else "")
    if times["forward"] != 1:
        raise ScheduleError(f"{where} has {times['forward']} forwards, not 1")
    halves = (times["backward_input"], times["backward_weight"])
    if (times["backward"], *halves) not in ((1, 0, 0), (0, 1, 1)):
        raise ScheduleError(
            f"{where} has {times['backward']} whole backwards and {halves[0]} and {halves[1]} halves: its gradient "
            "would be missing or counted twice. Give one whole backward or one of each half"
        )


@dataclass
class _Ledger:
    """What one stage holds while its actions run: versions, activations, gradients."""

    schedule: Schedule
    stage: int
    newest: int = 0
    most_versions: int = 1
    most_held: int = 0
    delay: int = 0
    held: dict[tuple[int, int, int], int] = field(default_factory=dict)
    halved: set[tuple[int, int, int]] = field(default_factory=set)
    last: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    finished: Counter[int] = field(default_factory=Counter)
    to_use: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for action in self.schedule.actions[self.stage]:
            if action.kind != "update":
                self.to_use[action.version] += 1

    def enter(self, action: Action) -> None:
        """Account for one action."""
        if action.kind == "update":
            self._update(action)
            return
        self._check_version(action)
        self._check_order(action)
        key = (action.chunk, action.batch, action.micro_batch)
        if action.kind == "forward":
            self.held[key] = action.version
            self.most_held = max(self.most_held, len(self.held))
        elif key not in self.held:
            raise self._error(action, "comes before its forward. Put the forward first")
        elif self.held[key] != action.version:
            raise self._error(
                action, f"comes after a forward on version {self.held[key]}. Use the same version for both"
            )
        elif action.kind == "backward_input":
            self.halved.add(key)
        elif action.kind == "backward_weight" and key not in self.halved:
            raise self._error(action, "comes before the half for the inputs. Put that half first")
        else:
            del self.held[key]
            self.finished[action.batch] += 1
        self.to_use[action.version] -= 1

    def _update(self, action: Action) -> None:
        needed = self.schedule.micro_batches * self.schedule.chunks
        if self.finished[action.batch] != needed:
            raise self._error(
                action, f"comes after {self.finished[action.batch]} of {needed} backwards. Update after the last one"
            )
        if action.version != action.batch + 1 or action.version != self.newest + 1:
            raise self._error(action, f"comes while the newest is version {self.newest}. Update in order")
        self.newest = action.version
        live = {version for version, uses in self.to_use.items() if uses and version <= self.newest} | {self.newest}
        self.most_versions = max(self.most_versions, len(live))

    def _check_version(self, action: Action) -> None:
        s = self.schedule
        rule = expected_version(
            s.name, batch=action.batch, stage=self.stage, stages=s.stages, micro_batches=s.micro_batches
        )
        key = (action.chunk, action.batch, action.micro_batch)
        if action.kind != "forward" and key in self.held and self.held[key] != action.version:
            return  # said more plainly by the caller
        if action.version != rule:
            raise self._error(action, f"should run on version {rule}, by the rule of {s.name}")
        if action.version > self.newest:
            raise self._error(
                action, f"comes when the newest is version {self.newest}. Use more micro-batches or an older version"
            )
        self.delay = max(self.delay, action.batch - action.version)

    def _check_order(self, action: Action) -> None:
        now, before = (action.batch, action.micro_batch), self.last.get((action.kind, action.chunk), (-1, -1))
        if now < before:
            raise self._error(
                action,
                f"comes after batch {before[0]}, micro-batch {before[1]}. Gradients are added in ascending order: "
                "keep the micro-batches in order",
            )
        self.last[action.kind, action.chunk] = now

    def _error(self, action: Action, what: str) -> ScheduleError:
        return ScheduleError(f"stage {self.stage}: {action} {what}")
