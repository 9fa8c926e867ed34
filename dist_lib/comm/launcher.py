"""Start one function on several processes of this machine and bring back results, or the first failure.

The processes are forked from a server that has torch already imported, so a launch costs about a tenth of a second
after the first. They meet through a file in a directory of this launch alone: no port can be busy. Each watches a
pipe to the launching process and ends when it is gone: no orphans. This is for notebooks, tests and labs on one
machine; for several machines use ``torchrun``.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dist_lib.comm._ship import pack, ship

logger = logging.getLogger(__name__)
GRACE_S = 0.5  # after the first failure: time for the rank that caused it to report as well
TAIL_LINES = 20


class LaunchError(RuntimeError):
    """A launch that did not return a result from every rank."""


class RankError(LaunchError):
    """A rank raised or died. ``rank`` is the first that did; the message holds its own traceback."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchTimeout(LaunchError):
    """Some ranks had not finished in time. ``ranks`` names them; the message holds their last output."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass
class _Job:
    """What a rank is told: plain data, pickled by ``multiprocessing``."""

    module: str
    qualname: str
    path: str | None
    payload: bytes
    directory: str
    world_size: int
    device: str
    group_timeout_s: float
    threads: int


def _end_with_parent(alive: Connection) -> None:
    try:
        alive.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _rank_main(rank: int, job: _Job, results: Connection, alive: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process decides; Ctrl-C reaches the whole terminal
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    try:
        log = os.open(os.path.join(job.directory, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except FileNotFoundError:  # the launch was interrupted while this rank started, and has tidied up: nobody listens
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        import torch
        import torch.distributed as dist

        from dist_lib.comm.context import init_from_file

        torch.set_num_threads(job.threads)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(job.world_size)
        if job.path is not None:
            sys.path.insert(0, job.path)
        fn = reduce(getattr, job.qualname.split("."), importlib.import_module(job.module))
        args, kwargs = pickle.loads(job.payload)  # written by the launching process, through a pipe of its own
        init_from_file(
            os.path.join(job.directory, "rendezvous"),
            rank,
            job.world_size,
            device=job.device,
            timeout_s=job.group_timeout_s,
        )
        dist.barrier()  # all are connected: a rank that returns at once must not leave while another still connects
        value = fn(*args, **kwargs)  # type: ignore[operator]
        message = pickle.dumps(("ok", time.monotonic(), value))
        dist.destroy_process_group()
    except BaseException:
        message = pickle.dumps(("error", time.monotonic(), traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    results.send_bytes(message)
    results.close()
    os._exit(0)  # no destructors of half-dead process groups, which may wait for peers


@dataclass
class _Outcomes:
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, tuple[float, str]] = field(default_factory=dict)
    deaths: dict[int, int | None] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.errors or self.deaths)

    @property
    def count(self) -> int:
        return len(self.values) + len(self.errors) + len(self.deaths)


def _tail(directory: Path, rank: int) -> str:
    path = directory / f"rank-{rank}.log"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


class _OutputPump:
    """Hands new lines of each rank's output to the caller while the ranks run."""

    def __init__(self, directory: Path, world_size: int, on_output: Callable[[int, str], None] | None) -> None:
        self.paths = [directory / f"rank-{r}.log" for r in range(world_size)]
        self.offsets = [0] * world_size
        self.on_output = on_output

    def __call__(self, *, final: bool = False) -> None:
        if self.on_output is None:
            return
        for rank, path in enumerate(self.paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self.offsets[rank])
                data = file.read()
            end = len(data) if final else data.rfind(b"\n") + 1
            self.offsets[rank] += end
            for line in data[:end].decode("utf-8", "replace").splitlines():
                self.on_output(rank, line)


def _receive(connection: Connection, rank: int, process: Any, outcomes: _Outcomes) -> None:
    try:
        kind, when, value = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join(2.0)
        outcomes.deaths[rank] = process.exitcode
        return
    except Exception:  # whatever a class of the rank's raises when it is made again here
        text = f"its result cannot be unpickled in the launching process; return plain data\n{traceback.format_exc()}"
        outcomes.errors[rank] = (time.monotonic(), text)
        return
    if kind == "ok":
        outcomes.values[rank] = value
    else:
        outcomes.errors[rank] = (when, value)


def _collect(processes: Sequence[Any], ends: Mapping[Connection, int], deadline: float, pump: _OutputPump) -> _Outcomes:
    outcomes, open_ends, stop_at = _Outcomes(), dict(ends), deadline
    while open_ends and time.monotonic() < stop_at:
        for end in wait(list(open_ends), timeout=min(0.1, max(0.0, stop_at - time.monotonic()))):
            assert isinstance(end, Connection)
            rank = open_ends.pop(end)
            _receive(end, rank, processes[rank], outcomes)
            if outcomes.failed and stop_at == deadline:
                stop_at = min(deadline, time.monotonic() + GRACE_S)
        pump()
    return outcomes


def _raise_failure(outcomes: _Outcomes, world_size: int, directory: Path) -> None:
    if outcomes.deaths:
        rank, code = next(iter(sorted(outcomes.deaths.items())))
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code and code < 0
            else (f"ended with exit code {code}")
        )
        note = " (out of memory?)" if code == -signal.SIGKILL else ""
        if not (directory / f"rank-{rank}.log").exists():  # ended while Python imported the script that called launch
            raise RankError(
                f"rank {rank} of {world_size} {how} before it began. Every rank imports the script that launches it: "
                "put the call of launch under `if __name__ == '__main__':`; the rank's own error is on standard error",
                rank,
            )
        tail = _tail(directory, rank)
        raise RankError(f"rank {rank} of {world_size} {how}{note} before it returned.\nIts last output:\n{tail}", rank)
    rank, (_, text) = min(outcomes.errors.items(), key=lambda item: item[1][0])
    others = sorted(set(outcomes.errors) - {rank})
    also = f"\nRanks {others} failed after it." if others else ""
    tail = _tail(directory, rank)
    shown = f"\nIts last output:\n{tail}" if tail else ""
    raise RankError(f"rank {rank} of {world_size} raised:\n{text}{shown}{also}", rank)


def launch(
    fn: Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    group_timeout_s: float | None = None,
    threads_per_rank: int = 1,
    device: str = "cpu",
    on_output: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` processes that form a process group; return results in rank order.

    Args:
        fn: a function at the top level of a module, a script or a notebook cell.
        world_size: number of processes, at least 1.
        args, kwargs: arguments, the same for all ranks; must pickle.
        timeout_s: for the whole launch, in seconds.
        group_timeout_s: for each collective; default: the smaller of 30 s and ``timeout_s``.
        threads_per_rank: intra-op threads of torch in each process.
        device: ``"cpu"`` (gloo), ``"cuda"`` (NCCL, one GPU a rank) or ``"auto"``.
        on_output: called as ``on_output(rank, line)`` for each line that a rank prints.

    Raises:
        RankError: with the traceback of the first rank that failed; the others are ended within a second.
        LaunchTimeout: naming the ranks that were still running, with their last output.
        ValueError: a bad ``world_size`` or ``timeout_s``, or a function that cannot be shipped.
    """
    if world_size < 1 or timeout_s <= 0 or threads_per_rank < 1:
        raise ValueError(
            f"world_size {world_size}, timeout_s {timeout_s}, threads_per_rank {threads_per_rank}: "
            "need at least 1 process, more than 0 seconds and at least 1 thread"
        )
    context = mp.get_context("forkserver")
    # The first optimizer of a process imports torch._dynamo: a second for each rank, unless the server has it already.
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="dist_lib_launch_", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        module, qualname, path = ship(fn, directory)
        payload = pack((tuple(args), dict(kwargs or {})))
        limit = min(30.0, timeout_s) if group_timeout_s is None else group_timeout_s
        job = _Job(module, qualname, path, payload, name, world_size, device, limit, threads_per_rank)
        pump = _OutputPump(directory, world_size, on_output)
        deadline = time.monotonic() + timeout_s
        processes: list[Any] = []
        ends: dict[Connection, int] = {}
        holds: list[Connection] = []  # closed last: the ranks end when these do
        try:
            for rank in range(world_size):
                receive, send = context.Pipe(duplex=False)
                watched, hold = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, job, send, watched), daemon=True)
                process.start()
                send.close()
                watched.close()
                processes.append(process)
                ends[receive] = rank
                holds.append(hold)
            outcomes = _collect(processes, ends, deadline, pump)
        finally:
            for process in processes:
                process.join(0.2)  # one that has reported is on its way out
                process.kill()
                process.join(5.0)
            for connection in (*ends, *holds):
                connection.close()
            pump(final=True)
        if outcomes.failed:
            _raise_failure(outcomes, world_size, directory)
        if outcomes.count < world_size:
            running = sorted(set(range(world_size)) - set(outcomes.values))
            tails = "\n".join(f"--- rank {r}, last output ---\n{_tail(directory, r)}" for r in running)
            raise LaunchTimeout(f"ranks {running} of {world_size} still ran after {timeout_s:g} s.\n{tails}", running)
        return [outcomes.values[rank] for rank in range(world_size)]
