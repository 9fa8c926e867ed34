"""Checkpoints of an outer loop in a folder that all workers share, complete or not there at all.

Every worker writes its own file, for its error-feedback buffer and its inner optimizer exist nowhere else. Only when
all files are on disk does rank 0 write the marker that makes the checkpoint count; it names the SHA-256 of each file,
so a file that is damaged or of another attempt is found. A checkpoint from within a round is for the same number of
workers. One from between rounds is for any number: fewer workers take over the buffers of those that are gone, further
ones begin with the agreed weights, the outer momentum and an empty buffer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_lib.pulse.errors import StateError
from dist_lib.pulse.loco import PulseLoCo
from dist_lib.pulse.loco_loop import OuterLoop

MARKER = "complete.json"
_NAME = re.compile(r"round-(\d{8})-step-(\d{6})")


@dataclass(frozen=True)
class Resumed:
    """What was loaded, the same on every worker.

    Attributes:
        path: folder of the checkpoint.
        round, inner_step: where the loop stands now.
        saved_workers: how many wrote it.
        joined: ranks without a file, which begin with an empty buffer.
        adopted: ranks, each with those of the missing workers whose buffers it took over.
    """

    path: Path
    round: int
    inner_step: int
    saved_workers: int
    joined: tuple[int, ...]
    adopted: Mapping[int, tuple[int, ...]]


def _file(path: Path, rank: int) -> Path:
    return path / f"rank-{rank:05d}.pt"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tag(sha256: str) -> int:
    """The first 56 bits of a hash, to be sent as a number."""
    return int(sha256[:14], 16)


def _replace(path: Path, write: Any) -> None:
    """Write beside ``path``, flush to disk, then rename: the name never stands for half a file."""
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def save_checkpoint(loop: OuterLoop, folder: str | Path, *, keep: int = 2) -> Path:
    """Save all workers' states, mid-round too; collective.

    Args:
        loop: on every worker at the same round and inner step.
        folder: shared by all workers.
        keep: checkpoints from between rounds that stay, the newest ones, with all that are newer than the oldest of
            them; others are removed once this one counts.

    Returns:
        Folder of this checkpoint, which counts from now on.

    Raises:
        ValueError: ``keep`` below 1.
        DesyncError: on all workers, which stand at different places.
        WorkerLostError: a worker died meanwhile; the checkpoint does not count.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay")
    channel = loop.channel
    path = Path(folder) / f"round-{loop.rounds:08d}-step-{loop.inner_step:06d}"
    with loop.in_step():
        if channel.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            (path / MARKER).unlink(missing_ok=True)  # of an earlier attempt, whose files are about to be replaced
        channel.announce("save", loop.rounds, loop.inner_step, 0)
        path.mkdir(parents=True, exist_ok=True)
        state = loop.state_dict()
        _replace(_file(path, channel.rank), lambda file: torch.save(state, file))
        seen = channel.announce("save", loop.rounds, loop.inner_step, _tag(_sha256(_file(path, channel.rank))))
        if channel.rank == 0:
            hashes = [_sha256(_file(path, rank)) for rank in range(channel.workers)]
            wrong = [r for r, h in enumerate(hashes) if _tag(h) != seen[r]]
            if wrong:
                raise StateError(f"files of ranks {wrong} in {path} are not what they wrote: is the folder shared?")
            marker = {"round": loop.rounds, "inner_step": loop.inner_step, "sha256": hashes}
            _replace(path / MARKER, lambda file: file.write(json.dumps(marker, indent=1).encode()))
            _prune(Path(folder), keep)
        channel.announce("save", loop.rounds, loop.inner_step, 1)
    return path


def checkpoints(folder: str | Path) -> list[tuple[int, int, int, Path]]:
    """Complete checkpoints of a folder, oldest first: round, inner step, number of workers, path."""
    found = []
    for path in Path(folder).glob("round-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or not (path / MARKER).exists():
            continue
        workers = len(json.loads((path / MARKER).read_text())["sha256"])
        found.append((int(match[1]), int(match[2]), workers, path))
    return sorted(found)


def _prune(folder: Path, keep: int) -> None:
    """Remove what is older than the ``keep`` newest checkpoints from between rounds; markers first."""
    between = [path.name for _, step, _, path in checkpoints(folder) if step == 0]
    if len(between) <= keep:
        return
    for path in folder.glob("round-*"):
        if _NAME.fullmatch(path.name) and path.name < between[-keep]:
            (path / MARKER).unlink(missing_ok=True)
            shutil.rmtree(path)


def _read(path: Path, rank: int) -> dict[str, Any]:
    """State of one worker, on the CPU.

    Raises:
        StateError: the file is missing, or not the one that the marker names.
    """
    file = _file(path, rank)
    expected = json.loads((path / MARKER).read_text())["sha256"][rank]
    if not file.exists() or _sha256(file) != expected:
        raise StateError(f"{file} is missing or damaged; remove {path} to resume from an older checkpoint")
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def resume(loop: OuterLoop, folder: str | Path) -> Resumed | None:
    """Load the newest complete checkpoint that this number of workers can continue; collective.

    Args:
        loop: freshly made on every worker.
        folder: shared by all workers.

    Returns:
        What was loaded; None if there is no such checkpoint, and nothing has changed.

    Raises:
        StateError: on a worker whose file is missing, damaged or of another model; the others raise DesyncError.
        AgreementError: on all workers, if they end with different weights.
    """
    channel = loop.channel
    usable = [c for c in checkpoints(folder) if not c[1] or c[2] == channel.workers] if channel.rank == 0 else []
    place = usable[-1] if usable else (-1, 0, 0, Path())
    with loop.in_step():
        rounds, step, saved = (channel.announce("resume", 0, 0, number)[0] for number in place[:3])
        if rounds < 0:
            return None
        path = Path(folder) / f"round-{rounds:08d}-step-{step:06d}"
        mine = channel.rank < saved
        state = _state_or_problem(path, channel.rank if mine else 0)
        loop.load_state_dict(state) if mine else loop.load_consensus(state)
        adopted = _adopt(loop, path, saved)
    joined = tuple(range(saved, channel.workers))
    return Resumed(path, rounds, step, saved, joined, adopted)


def _adopt(loop: OuterLoop, path: Path, saved: int) -> dict[int, tuple[int, ...]]:
    """Give the buffers of workers that are gone to the others, in turn; collective."""
    if not isinstance(loop, PulseLoCo) or saved <= loop.channel.workers:
        return {}
    workers, problem = loop.channel.workers, ""
    adopted = {rank: tuple(range(workers + rank, saved, workers)) for rank in range(min(workers, saved - workers))}
    try:
        for gone in adopted.get(loop.channel.rank, ()):
            loop.adopt(_read(path, gone)["error"])
    except StateError as error:
        problem = str(error)
    if -1 in loop.channel.announce("resume", 0, 0, -1 if problem else 0):
        raise StateError(problem or "another worker could not read the buffer of a worker that is gone")
    return adopted


def _state_or_problem(path: Path, rank: int) -> dict[str, Any]:
    """The state, or one that every loop refuses by name: all workers then hear of it together."""
    try:
        return _read(path, rank)
    except StateError as error:
        return {"format": str(error)}
