"""Pipeline schedules as data: for each stage, in order, what it computes and on which weights.

A schedule says nothing about time and sends nothing. It is checked by :func:`~dist_lib.async_pipeline.validate`,
timed by :func:`~dist_lib.async_pipeline.simulate` and drawn from the same :class:`Event` records that a real run
leaves. Stages, batches and micro-batches count from 0; version ``v`` of the weights is the one after ``v`` updates.

Six schedules, all in the order "one forward, one backward" but the first:

* ``gpipe``: all forwards, then all backwards, then the update.
* ``1f1b``: stage ``s`` runs ``p - 1 - s`` forwards ahead; flushed before each update.
* ``interleaved``: every stage holds ``v`` chunks of the model, in Megatron's order (arXiv 2104.04473).
* ``zb-h1``: the backward is split; the half that only yields weight gradients fills the drain (arXiv 2401.10241).
* ``pipedream``: never flushed; a stage updates as soon as a batch is done, so early stages lag more (arXiv 1806.03377).
* ``2bw``: never flushed; every stage computes batch ``g`` on version ``max(g - 1, 0)`` (arXiv 2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["forward", "backward", "backward_input", "backward_weight", "update"]
Name = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw"]

KINDS: tuple[Kind, ...] = get_args(Kind)
SCHEDULES: tuple[Name, ...] = get_args(Name)


class ScheduleError(ValueError):
    """A schedule that cannot be made, or one that would compute something else than it promises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One piece of work of one stage.

    Attributes:
        kind: ``"forward"``, ``"backward"`` (whole), ``"backward_input"``, ``"backward_weight"`` or ``"update"``.
        stage: the stage (rank) that does it.
        batch: the batch, which is also the number of the update that its gradient makes.
        micro_batch: its place in the batch; 0 for an update.
        version: the version of the weights it runs on; for an update the version it makes.
        chunk: which of the stage's chunks of the model; always 0 unless interleaved.
    """

    kind: Kind
    stage: int
    batch: int
    micro_batch: int = 0
    version: int
    chunk: int = 0

    def __str__(self) -> str:
        if self.kind == "update":
            return f"update of batch {self.batch} (makes version {self.version})"
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind} of batch {self.batch}, micro-batch {self.micro_batch}{chunk} on version {self.version}"


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its time, simulated or recorded.

    Attributes:
        stage: the row it belongs to.
        action: what was done.
        start_s, end_s: when, in seconds from the start of the run.
    """

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every stage's actions in order.

    Attributes:
        name: one of :data:`SCHEDULES`; it fixes which version a batch runs on.
        stages, micro_batches, batches, chunks: p, m, K and v.
        actions: for each stage, its actions in order.
        flushed: whether the pipeline drains before each update.
    """

    name: Name
    stages: int
    micro_batches: int
    batches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]
    flushed: bool


def version_of(batch: int) -> int:
    """The version on which 2BW runs batch ``batch``: ``max(batch - 1, 0)``, at every stage."""
    return max(batch - 1, 0)


def expected_version(name: Name, *, batch: int, stage: int, stages: int, micro_batches: int) -> int:
    """The version on which a schedule runs a batch at a stage.

    Flushed schedules use the newest, ``batch``. PipeDream's stage ``s`` has begun ``p - 1 - s`` micro-batches before
    the last backward it waits for, so it lags ``ceil((p - 1 - s) / m)`` updates (``p - 1 - s`` with one micro-batch a
    batch, as published; more micro-batches are our generalisation, every batch keeping one version on a stage).
    """
    if name == "2bw":
        return version_of(batch)
    if name == "pipedream":
        return max(batch - -(-(stages - 1 - stage) // micro_batches), 0)
    return batch


def make_schedule(
    name: Name, *, stages: int, micro_batches: int, batches: int, chunks: int = 1, allow_edge: bool = False
) -> Schedule:
    """Build one of the six schedules.

    Args:
        name: one of :data:`SCHEDULES`.
        stages: p, at least 1.
        micro_batches: m, micro-batches in a batch (one optimizer step), at least 1.
        batches: K, at least 1.
        chunks: v, chunks of the model on a stage; more than 1 only for ``interleaved``.
        allow_edge: accept ``m = p - 1`` for ``2bw``, where the version exists just in time (our derivation).

    Raises:
        ScheduleError: an unknown name, a size below 1, chunks without ``interleaved``, ``interleaved`` with
            ``m`` no multiple of ``p``, or ``2bw`` with ``m < p`` (``m < p - 1`` with ``allow_edge``).
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is not known; choose one of {', '.join(SCHEDULES)}")
    for what, value in (
        ("stages", stages),
        ("micro_batches", micro_batches),
        ("batches", batches),
        ("chunks", chunks),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{what}={value!r}: give a whole number of at least 1")
    if chunks > 1 and name != "interleaved":
        raise ScheduleError(f"chunks={chunks}: only 'interleaved' places several chunks on a stage, not {name!r}")
    if name == "interleaved" and micro_batches % stages:
        raise ScheduleError(
            f"interleaved with {micro_batches} micro-batches on {stages} stages: its order goes round in groups of "
            f"{stages} micro-batches; give a multiple of {stages}"
        )
    least = max(stages - 1 if allow_edge else stages, 1)
    if name == "2bw" and micro_batches < least:
        edge = "" if allow_edge else f" ({stages - 1} works too, without slack: allow_edge=True)" * (stages > 2)
        raise ScheduleError(
            f"2bw with {micro_batches} micro-batches on {stages} stages: a batch would need weights that do not exist "
            f"yet; give at least {least} micro-batches{edge} or fewer stages"
        )
    rows = tuple(_ROWS[name](s, stages, micro_batches, batches, chunks) for s in range(stages))
    return Schedule(
        name=name,
        stages=stages,
        micro_batches=micro_batches,
        batches=batches,
        chunks=chunks,
        actions=rows,
        flushed=name not in ("pipedream", "2bw"),
    )


def _work(kind: Kind, stage: int, batch: int, micro_batch: int, chunk: int = 0, version: int | None = None) -> Action:
    at = batch if version is None else version
    return Action(kind=kind, stage=stage, batch=batch, micro_batch=micro_batch, version=at, chunk=chunk)


def _update(stage: int, batch: int) -> Action:
    return Action(kind="update", stage=stage, batch=batch, version=batch + 1)


def _gpipe(stage: int, stages: int, micro_batches: int, batches: int, chunks: int) -> tuple[Action, ...]:
    row: list[Action] = []
    for g in range(batches):
        row += [_work("forward", stage, g, j) for j in range(micro_batches)]
        row += [_work("backward", stage, g, j) for j in range(micro_batches)]
        row.append(_update(stage, g))
    return tuple(row)


def _one_f_one_b(stage: int, stages: int, micro_batches: int, batches: int, chunks: int) -> tuple[Action, ...]:
    ahead, row = min(stages - 1 - stage, micro_batches), list[Action]()
    for g in range(batches):
        row += [_work("forward", stage, g, j) for j in range(ahead)]
        for j in range(micro_batches):
            if j + ahead < micro_batches:
                row.append(_work("forward", stage, g, j + ahead))
            row.append(_work("backward", stage, g, j))
        row.append(_update(stage, g))
    return tuple(row)


def _interleaved(stage: int, stages: int, micro_batches: int, batches: int, chunks: int) -> tuple[Action, ...]:
    total = micro_batches * chunks
    ahead = min(2 * (stages - 1 - stage) + (chunks - 1) * stages, total)

    def place(k: int) -> tuple[int, int]:  # the k-th visit of this stage: micro-batch and chunk
        group, rest = divmod(k, stages * chunks)
        return group * stages + rest % stages, rest // stages

    row: list[Action] = []
    for g in range(batches):
        for k in range(total + ahead):
            if k < total:
                row.append(_work("forward", stage, g, *place(k)))
            if k >= ahead:
                j, chunk = place(k - ahead)
                row.append(_work("backward", stage, g, j, chunks - 1 - chunk))
        row.append(_update(stage, g))
    return tuple(row)


def _zero_bubble(stage: int, stages: int, micro_batches: int, batches: int, chunks: int) -> tuple[Action, ...]:
    ahead, row = min(stages - 1 - stage, micro_batches), list[Action]()
    for g in range(batches):
        row += [_work("forward", stage, g, j) for j in range(ahead)]
        for j in range(micro_batches):
            if j + ahead < micro_batches:
                row.append(_work("forward", stage, g, j + ahead))
            row.append(_work("backward_input", stage, g, j))
            if j >= stage:  # stage s owes s weight gradients, so that every stage holds at most p micro-batches
                row.append(_work("backward_weight", stage, g, j - stage))
        row += [_work("backward_weight", stage, g, j) for j in range(max(micro_batches - stage, 0), micro_batches)]
        row.append(_update(stage, g))
    return tuple(row)


def _never_flushed(
    stage: int, stages: int, micro_batches: int, batches: int, *, name: Name, lazy: bool
) -> tuple[Action, ...]:
    """1F1B over all micro-batches of the run; the update when its batch is done, or just before it is needed."""
    total = micro_batches * batches
    ahead, row, done = min(stages - 1 - stage, total), list[Action](), 0

    def work(kind: Kind, k: int) -> Action:
        g, j = divmod(k, micro_batches)
        at = expected_version(name, batch=g, stage=stage, stages=stages, micro_batches=micro_batches)
        return _work(kind, stage, g, j, version=at)

    for k in range(total + ahead):
        if k < total:
            if lazy and k % micro_batches == 0 and version_of(k // micro_batches) > done:
                row.append(_update(stage, done))
                done += 1
            row.append(work("forward", k))
        if k >= ahead:
            row.append(work("backward", k - ahead))
            if not lazy and (k - ahead + 1) % micro_batches == 0:
                row.append(_update(stage, done))
                done += 1
    return (*row, *(_update(stage, g) for g in range(done, batches)))


def _pipedream(stage: int, stages: int, micro_batches: int, batches: int, chunks: int) -> tuple[Action, ...]:
    return _never_flushed(stage, stages, micro_batches, batches, name="pipedream", lazy=False)


def _two_versions(stage: int, stages: int, micro_batches: int, batches: int, chunks: int) -> tuple[Action, ...]:
    return _never_flushed(stage, stages, micro_batches, batches, name="2bw", lazy=True)


_ROWS: dict[str, Callable[[int, int, int, int, int], tuple[Action, ...]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
    "pipedream": _pipedream,
    "2bw": _two_versions,
}
