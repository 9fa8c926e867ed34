"""Closed forms for balanced stages whose communication is hidden: time, idle share, copies, activations, delay.

They are what the literature quotes and what the simulator must equal; they know no latency, no optimizer time and no
imbalance. Sizes: p = ``stages``, m = ``micro_batches`` in a batch, K = ``batches``, v = ``chunks``. The forms for
GPipe, 1F1B, interleaving and ZB-H1 are those of the papers named in ``schedules``; the
ones over a finite run without flush, the extension of ZB-H1 to ``m < p`` and of PipeDream to ``m > 1`` are our
derivations.
"""

from __future__ import annotations

from dist_lib.async_pipeline.schedules import SCHEDULES, Name, ScheduleError, expected_version
from dist_lib.async_pipeline.simulator import StageTimes


def _check(name: str, **sizes: int) -> None:
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is not known; choose one of {', '.join(SCHEDULES)}")
    for what, value in sizes.items():
        if value < (0 if what == "stage" else 1):
            raise ScheduleError(f"{what}={value}: give at least {0 if what == 'stage' else 1}")
    if "stage" in sizes and sizes["stage"] >= sizes["stages"]:
        raise ScheduleError(f"stage={sizes['stage']}: the stages are 0 to {sizes['stages'] - 1}")
    if sizes.get("chunks", 1) > 1 and name != "interleaved":
        raise ScheduleError(f"chunks={sizes['chunks']}: only 'interleaved' has several, not {name!r}")


def bubble_s(name: Name, times: StageTimes, *, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Seconds in which a stage waits, each time the pipeline fills and drains.

    ``(p - 1)(tF + tB)`` as a rule, ``1 / v`` of it interleaved, and ``(p - 1)(tF + tBx - tW)`` for ZB-H1 with
    ``m >= p``, where tBx and tW are the backward's halves. A flushed schedule pays it in every batch, the others once.

    Raises:
        ScheduleError: an unknown name or size; ZB-H1 with ``tW > tF`` or ``tW > tBx``, where its fixed order has no
            such form (simulate it instead).
    """
    _check(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    whole = (stages - 1) * times.period_s
    if name == "interleaved":
        return whole / chunks
    if name != "zb-h1":
        return whole
    first, second = float(times.backward_input_s or 0.0), float(times.backward_weight_s or 0.0)
    if stages > 1 and (second > times.forward_s or second > first):
        raise ScheduleError(
            f"zb-h1 with backward_weight_s={second}, longer than forward_s={times.forward_s} or "
            f"backward_input_s={first}: the closed form does not hold; simulate the schedule"
        )
    return (stages - 1) * (times.forward_s + first) - min(stages - 1, micro_batches - 1) * second


def makespan_s(
    name: Name, times: StageTimes, *, stages: int, micro_batches: int, batches: int = 1, chunks: int = 1
) -> float:
    """Seconds from the first forward to the last backward of ``batches`` batches.

    Flushed: ``K`` times work and bubble, ``K (m + p - 1)(tF + tB)`` for GPipe and 1F1B. PipeDream and 2BW:
    ``(K m + p - 1)(tF + tB)``.

    Raises:
        ScheduleError: as for :func:`bubble_s`.
    """
    _check(name, batches=batches)
    bubble = bubble_s(name, times, stages=stages, micro_batches=micro_batches, chunks=chunks)
    fills = 1 if name in ("pipedream", "2bw") else batches
    return batches * micro_batches * times.period_s + fills * bubble


def idle_share(name: Name, *, stages: int, micro_batches: int, batches: int | None = None, chunks: int = 1) -> float:
    """The share of the time in which a stage waits; ZB-H1 with ``tF = tBx = tW``.

    Args:
        name: one of :data:`~dist_lib.async_pipeline.schedules.SCHEDULES`.
        stages, micro_batches, chunks: p, m and v.
        batches: the length of the run, fill and drain included; None for the steady state (0 without flush).

    Returns:
        ``(p - 1) / (m + p - 1)`` for GPipe and 1F1B, ``(p - 1) / (v m + p - 1)`` interleaved,
        ``(p - 1) / (K m + p - 1)`` for PipeDream and 2BW.

    Raises:
        ScheduleError: an unknown name or size.
    """
    _check(name, stages=stages, micro_batches=micro_batches, chunks=chunks, batches=1 if batches is None else batches)
    if name in ("pipedream", "2bw") and batches is None:
        return 0.0
    times = StageTimes(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    sizes = {"stages": stages, "micro_batches": micro_batches, "batches": batches or 1, "chunks": chunks}
    total = makespan_s(name, times, **sizes)
    return 1.0 - (batches or 1) * micro_batches * times.period_s / total


def gradient_delay(name: Name, *, stage: int, stages: int, micro_batches: int) -> int:
    """Updates between the weights a gradient is taken at and those it is applied to, once the pipeline is full.

    0 when flushed, 1 for 2BW at every stage and depth, ``ceil((p - 1 - s) / m)`` for PipeDream: ``p - 1 - s`` with one
    micro-batch in a batch.

    Raises:
        ScheduleError: an unknown name or size.
    """
    _check(name, stage=stage, stages=stages, micro_batches=micro_batches)
    late = stages + 2  # any batch after the start
    return late - expected_version(name, batch=late, stage=stage, stages=stages, micro_batches=micro_batches)


def weight_copies(name: Name, *, stage: int, stages: int, micro_batches: int) -> int:
    """Weight versions that a stage keeps: 1 when flushed, 2 for 2BW, at most ``p - s`` for PipeDream: the delay plus 1.

    With the late updates of our 2BW order the last stage could do with one version, as it holds a second gradient
    instead; so its simulated count is 1.

    Raises:
        ScheduleError: an unknown name or size.
    """
    return 1 + gradient_delay(name, stage=stage, stages=stages, micro_batches=micro_batches)


def activation_micro_batches(
    name: Name, *, stage: int, stages: int, micro_batches: int, batches: int = 1, chunks: int = 1
) -> float:
    """Micro-batches whose activations a stage holds at most, each counted with all layers of the stage.

    GPipe ``m``; 1F1B ``p - s``; PipeDream and 2BW the same over the whole run; ZB-H1 ``p``; interleaved
    ``(2 (p - 1 - s) + (v - 1) p + 1) / v``, at stage 0 ``p (1 + (p - 1) / (p v))``; never more than there are.

    Raises:
        ScheduleError: an unknown name or size.
    """
    _check(name, stage=stage, stages=stages, micro_batches=micro_batches, batches=batches, chunks=chunks)
    if name == "gpipe":
        return micro_batches
    if name == "interleaved":
        ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
        return min(ahead + 1, micro_batches * chunks) / chunks
    if name == "zb-h1":
        return min(stages, micro_batches)
    return min(stages - stage, micro_batches if name == "1f1b" else micro_batches * batches)


def ideal_speedup(*, stages: int, micro_batches: int, batches: int | None = None) -> float:
    """How much faster 2BW is than flushed 1F1B: ``(m + p - 1) / m``, or over ``K`` batches with one fill and drain.

    Ideal: balanced stages, hidden communication, no optimizer time; not a measurement.

    Raises:
        ScheduleError: a size below 1.
    """
    _check("2bw", stages=stages, micro_batches=micro_batches, batches=1 if batches is None else batches)
    if batches is None:
        return (micro_batches + stages - 1) / micro_batches
    return batches * (micro_batches + stages - 1) / (batches * micro_batches + stages - 1)
