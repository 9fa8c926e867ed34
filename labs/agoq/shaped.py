"""Time all-reduces between hosts of a shaped link, and count what they hand to collectives and put on the wire.

Functions here run on the ranks; ``bench`` starts them. Each rank moves to a host of its own and makes a process group
there, so that gloo's connections run over the shaped link; the group that started the ranks is left alone.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dist_lib.agoq import GradientFormat, wire_bytes
from dist_lib.agoq import collectives as eight
from dist_lib.comm import CommCounter, collectives, launch
from labs.framework import LabError
from labs.shaped_link import INTERFACE, Host, ShapedLink

FORMATS = {"int8": GradientFormat("int8", 256), "dynamic8": GradientFormat("dynamic8", 256)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = (*FORMATS, *DTYPES)
HEADERS = 0.08  # of packets, acknowledgements and gloo's own, beside what is sent: at most this share


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is timed.

    Attributes:
        numel: numbers in the tensor.
        ranks: hosts with one process of one thread each.
        repeats: timed in one launch, after one that is not.
        megabits_per_s: of every host's interface.
    """

    numel: int = 2**24
    ranks: int = 2
    repeats: int = 5
    megabits_per_s: float = 1000.0


@dataclass(frozen=True)
class Timing:
    """One all-reduce on all ranks.

    Attributes:
        seconds: by the slowest rank, from a barrier on: the median of the repeats.
        payload: bytes that each rank handed to collectives, see :class:`~dist_lib.comm.CommCounter`.
        sent: bytes that left each host's interface, headers included.
        error: relative L2 distance of the result from the exact sum.
    """

    seconds: float
    payload: tuple[int, ...]
    sent: tuple[int, ...]
    error: float


def formula(name: str, work: Work) -> tuple[int, int]:
    """(payload, bytes sent) of one all-reduce on one rank; a ring for formats without codes."""
    if name in FORMATS:
        expected = wire_bytes("all_reduce", work.numel, work.ranks, FORMATS[name])
        return expected.all_to_all + expected.all_gather, expected.sent
    payload = work.numel * DTYPES[name].itemsize
    return payload, 2 * (work.ranks - 1) * payload // work.ranks


def _reduce(name: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    if name in FORMATS:
        eight.all_reduce(tensor, form=FORMATS[name], group=group)
    else:
        dist.all_reduce(tensor, group=group)  # bfloat16 travels and adds up as such; ours would widen it


def _left() -> int:
    """Bytes that have left this thread's host."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(fields[8])


def on_rank(name: str, hosts: tuple[Host, ...], work: Work) -> tuple[list[float], int, int, float]:
    """On one rank: seconds of each timed all-reduce; payload and bytes sent of one; error of the result."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    hosts[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # gloo's own setting
    group = dist.new_group(backend="gloo")
    values = [torch.randn(work.numel, generator=torch.Generator().manual_seed(r)) for r in range(work.ranks)]
    exact, mine = torch.stack(values).sum(0), values[rank].to(DTYPES.get(name, torch.float32))
    del values
    tensor = torch.empty_like(mine)
    seconds, payload, sent = [], 0, 0
    for repeat in range(work.repeats + 1):
        tensor.copy_(mine)
        collectives.barrier(group=group)
        before, begin = _left(), time.perf_counter()
        if repeat:
            _reduce(name, tensor, group)
            seconds.append(time.perf_counter() - begin)
        else:  # connections and buffers are made; counted, not timed
            with CommCounter() as counter:
                _reduce(name, tensor, group)
            payload = counter.bytes()
        collectives.barrier(group=group)
        sent = _left() - before
    error = float((tensor.float() - exact).norm() / exact.norm())
    return seconds, payload, sent, error


def measure(name: str, link: ShapedLink, work: Work) -> Timing:
    """Start the ranks, time one kind of all-reduce and check its bytes.

    Args:
        name: one of :data:`NAMES`.
        link: at least as many hosts as ranks.
        work: what to time.

    Raises:
        LabError: bytes that are not those of the formula, on the collectives or on the wire: then the time says
            nothing.
        RankError: a rank failed.
    """
    found = launch(on_rank, world_size=work.ranks, args=(name, link.hosts[: work.ranks], work), timeout_s=300)
    repeats = zip(*(seconds for seconds, *_ in found), strict=True)
    timing = Timing(
        seconds=statistics.median(max(times) for times in repeats),
        payload=tuple(payload for _, payload, _, _ in found),
        sent=tuple(sent for _, _, sent, _ in found),
        error=max(error for *_, error in found),
    )
    payload, sent = formula(name, work)
    if set(timing.payload) != {payload}:
        raise LabError(f"{name}: ranks handed {timing.payload} bytes to collectives, the formula says {payload}")
    if not all(sent <= n <= sent * (1 + HEADERS) for n in timing.sent):
        raise LabError(f"{name}: hosts sent {timing.sent} bytes, the formula says {sent} and headers")
    return timing
