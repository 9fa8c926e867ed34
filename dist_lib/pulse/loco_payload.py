"""The message of PULSELoCo, version 1: which coordinates a worker sends, and their FP32 values.

All integers are LEB128 in shortest form. The vector of all parameters is cut into segments of 2^22 cells.

======================  ==========================================================================================
field                   content
======================  ==========================================================================================
magic                   8 bytes ``DLLOCO01``
seal                    SHA-256 over all that follows
header                  round, rank, cells; for each segment the number of coordinates and, unless that is 0, the bytes
                        of its escapes and of its frame
body                    frames of the segments with coordinates, in order
======================  ==========================================================================================

A frame is zstd over gaps (one byte each, less one), escapes (the rest of gaps of 256 and more), and the values in byte
planes, lowest bytes first. Values travel as they are: nothing is rounded. The decoder knows round, rank and number of
cells beforehand, checks every size before it allocates, and refuses values that are not finite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dist_lib.pulse.codecs import SEGMENT, kernels
from dist_lib.pulse.errors import CorruptPatchError
from dist_lib.pulse.state import in_threads
from dist_lib.pulse.wire import Reader, Words, Writer, pack, planes, unpack, unplanes

MAGIC = b"DLLOCO01"
FIXED = 8 + 32
_ROUNDS, _RANKS = (1 << 63) - 1, (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class SparseUpdate:
    """Coordinates and values of one worker in one round.

    Attributes:
        round, rank: whose update it is.
        cells: length of the whole vector.
        segments: for each 2^22 cells the positions inside the segment (uint32, increasing) and the values (float32).
    """

    round: int
    rank: int
    cells: int
    segments: tuple[tuple[Words, Words], ...]

    @property
    def sent(self) -> int:
        """Number of coordinates."""
        return sum(positions.size for positions, _ in self.segments)


def segment_sizes(cells: int) -> Sequence[int]:
    """Cells of each segment of a vector."""
    return [min(SEGMENT, cells - start) for start in range(0, cells, SEGMENT)]


def _most_escapes(size: int) -> int:
    return 5 * (size // 255 + 1)


def payload_bound(cells: int) -> int:
    """No message about ``cells`` cells is longer, in bytes; known before any is received."""
    total = FIXED + 9 + 5 + 9
    for size in segment_sizes(cells):
        content = 5 * size + _most_escapes(size)
        total += 4 + 4 + 5 + content + (content >> 8) + 1024
    return total


def _encode_segment(segment: tuple[Words, Words], size: int) -> tuple[int, bytes]:
    positions, values = segment
    gaps, escapes = np.empty(positions.size, np.uint8), np.empty(_most_escapes(size), np.uint8)
    used = int(kernels().gap_pack(positions, gaps, escapes))
    return used, pack(b"".join(a.tobytes() for a in (gaps, escapes[:used], planes(values.view(np.uint32)))))


def encode_update(update: SparseUpdate) -> bytes:
    """The message of an update; the same update gives the same bytes.

    Raises:
        MissingPackageError: numba or zstandard is not installed.
    """
    sizes = segment_sizes(update.cells)
    pairs = [(s, size) for s, size in zip(update.segments, sizes, strict=True) if s[0].size]
    coded = iter(in_threads(lambda pair: _encode_segment(*pair), pairs))
    header, frames = Writer(), []
    header.numbers((update.round, update.rank, update.cells))
    for positions, _ in update.segments:
        header.number(positions.size)
        if positions.size:
            used, frame = next(coded)
            header.numbers((used, len(frame)))
            frames.append(frame)
    rest = header.done() + b"".join(frames)
    return b"".join((MAGIC, hashlib.sha256(rest).digest(), rest))


def _decode_segment(data: memoryview, count: int, used: int, size: int, what: str) -> tuple[Words, Words]:
    content = unpack(data, 5 * count + used, what)
    gaps, escapes, rest = np.split(content, [count, count + used])
    positions = np.empty(count, np.uint32)
    if kernels().gap_unpack(gaps, escapes, size, positions) < 0:
        raise CorruptPatchError(f"{what}: gaps that leave the segment or are not canonical")
    values = unplanes(rest, 4).view(np.float32)
    if not bool(np.isfinite(values).all()):
        raise CorruptPatchError(f"{what}: a value that is not finite")
    return positions, values


def decode_update(data: bytes | memoryview, *, round: int, rank: int, cells: int) -> SparseUpdate:
    """Read the message that ``rank`` sent in ``round`` about ``cells`` cells.

    Args:
        data: the whole message.
        round, rank, cells: what the receiver expects; a message of another round, worker or model is refused.

    Raises:
        CorruptPatchError: any deviation from the format, from the seal, or from what is expected.
        MissingPackageError: numba or zstandard is not installed.
    """
    view = memoryview(data)
    what = f"update of rank {rank} in round {round}"
    if len(view) < FIXED or len(view) > payload_bound(cells) or view[:8] != MAGIC:
        raise CorruptPatchError(f"{what}: not a message of version 1: {len(view)} bytes, {bytes(view[:8])!r}")
    if hashlib.sha256(view[FIXED:]).digest() != view[8:FIXED]:
        raise CorruptPatchError(f"{what}: damaged, its seal is of other bytes")
    reader = Reader(view[FIXED:], what)
    found = reader.number(_ROUNDS), reader.number(_RANKS), reader.number(_ROUNDS)
    if found != (round, rank, cells):
        raise reader.fail(f"of round, rank and cells {found}, expected {(round, rank, cells)}")
    plan: list[tuple[int, int, int]] = []
    for size in segment_sizes(cells):
        count = reader.number(size)
        plan.append((count, *((reader.number(_most_escapes(size)), reader.number(reader.left)) if count else (0, 0))))
    jobs = [
        (reader.raw(length), count, used, size, f"{what}, segment {i}")
        for i, ((count, used, length), size) in enumerate(zip(plan, segment_sizes(cells), strict=True))
    ]
    reader.end()
    empty = (np.empty(0, np.uint32), np.empty(0, np.float32))
    segments = in_threads(lambda job: _decode_segment(*job) if job[1] else empty, jobs)
    return SparseUpdate(round, rank, cells, tuple(segments))
