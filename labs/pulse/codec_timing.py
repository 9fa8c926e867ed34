"""What a codec does with one update: bytes, and the time of each part, on a recorded stream or a synthetic one.

The parts: *scan* finds the changed cells, *encode* codes them, *apply* copies the base and writes the decoded cells
over it, *verify* is the SHA-256 of the result. Memory for results stands before the clock starts, as at a receiver that
keeps two states and swaps them. Work is spread over threads by segments of at most 2^22 cells, largest tensors first.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse.codecs import CODECS, Change, Place, decode_segment, encode_change, find_changes
from dist_lib.pulse.format import segment_cells
from dist_lib.pulse.sparsity_measures import reference_bits
from dist_lib.pulse.state import State, as_words, find_ties, in_threads, spec_of, tensor_digest
from dist_lib.pulse.streams import adamw_stream

Words = np.ndarray[Any, Any]
PARTS = ("scan", "encode", "apply", "verify")
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Update:
    """Two states one step apart: segments of their changed tensors, and room for a result.

    Attributes:
        cells, changed: in all tensors, tied ones counted once.
        reference_bytes: what an ideal coder needs, tensor by tensor: see
            :func:`~dist_lib.pulse.sparsity_measures.reference_bits`.
        segments: (old words, new words, place, room) of changed tensors.
    """

    cells: int
    changed: int
    reference_bytes: float
    segments: tuple[tuple[Words, Words, Place, Words], ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return 2 * self.cells


@dataclass(frozen=True)
class CodecTiming:
    """One codec on one update: coded bytes, seconds of each part (least of several), most memory beyond the states."""

    codec: str
    workers: int
    nbytes: int
    seconds: dict[str, float]
    peak_bytes: dict[str, int]


def make_update(old: State, new: State) -> Update:
    """Prepare two states of bfloat16 tensors with the same names and shapes."""
    ties = find_ties(old)
    cells = changed = 0
    bits, segments = 0.0, []
    for name in sorted((n for n in old if n not in ties), key=lambda n: -old[n].numel()):
        before, after, spec = as_words(old[name]), as_words(new[name]), spec_of(name, old[name])
        cells += before.size
        count = int(np.count_nonzero(before != after))
        if not count:
            continue
        changed += count
        bits += reference_bits(old[name], new[name])
        for start, n in segment_cells(spec):
            here = slice(start, start + n)
            segments.append((before[here], after[here], Place(spec, start), before[here].copy()))
    return Update(cells, changed, bits / 8, tuple(segments))


def synthetic_update(cells: int = 1 << 23, *, lr: float = 1e-6, storage: str = "fp32", steps: int = 30) -> Update:
    """The last step of AdamW on independent normal weights, two tensors of ``cells / 2``."""
    step = deque(adamw_stream(cells, lr=lr, steps=steps, storage=storage), maxlen=1)[0]

    def state(flat: Tensor) -> State:
        return {name: part.reshape(-1, 1024) for name, part in zip("ab", flat.chunk(2), strict=True)}

    return make_update(state(step.old), state(step.new))


def least_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Least wall time of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def _resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text())
    return int(found.group(1)) << 10 if found else 0


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most resident memory during a call beyond what was resident before it; 0 where the system does not tell.

    What the allocator keeps of earlier calls is given back first, or the call would find its memory there.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        REFS.write_text("5")
    except (OSError, AttributeError, TypeError):
        return 0
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before)


class Work:
    """The parts of one codec on one update, each to be called as often as wanted."""

    def __init__(self, update: Update, codec: str, workers: int | None = None) -> None:
        self.update, self.codec, self.workers = update, CODECS[codec], workers
        self._items = range(len(update.segments))
        self.changes: Sequence[Change] = self.scan()
        self.coded = self.encode()

    def scan(self) -> list[Change]:
        """Find the changed cells."""
        return self._each(lambda i: find_changes(*self.update.segments[i][:2]))

    def encode(self) -> list[bytes]:
        """Code the changes that the last scan found."""
        old = self.update.segments
        return self._each(lambda i: encode_change(self.codec, old[i][0], self.changes[i], old[i][2]))

    def apply(self) -> None:
        """Decode into the room that stands ready."""

        def one(i: int) -> None:
            old, _, place, room = self.update.segments[i]
            decode_segment(self.codec, memoryview(self.coded[i]), old, place, room)

        self._each(one)

    def verify(self) -> None:
        """SHA-256 over what was applied."""
        spec = spec_of("segment", torch.empty(0, dtype=torch.bfloat16))
        self._each(lambda i: tensor_digest(spec, self.update.segments[i][3]))

    def check(self) -> bool:
        """Whether what was applied is the new state."""
        self.apply()
        return all(np.array_equal(room, new) for _, new, _, room in self.update.segments)

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        return in_threads(work, self._items, self.workers)


def time_codec(update: Update, codec: str, *, workers: int | None = None, repeats: int = 5) -> CodecTiming:
    """All parts of one codec.

    Raises:
        ValueError: what was applied is not the new state.
    """
    work = Work(update, codec, workers)
    if not work.check():
        raise ValueError(f"codec {codec!r} does not give back the new state")
    parts: dict[str, Callable[[], Any]] = {name: getattr(work, name) for name in PARTS}
    seconds = {name: least_seconds(part, repeats) for name, part in parts.items()}
    peaks = {name: peak_bytes(part) for name, part in parts.items()}
    used = 2 if workers is None else workers
    return CodecTiming(codec, used, sum(map(len, work.coded)), seconds, peaks)
