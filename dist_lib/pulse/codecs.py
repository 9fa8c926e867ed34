"""Three ways to write which cells of a segment changed, and to what.

``paper`` is the format that the paper's numbers were made with: row and column deltas in the narrowest types, absolute
values, zstd level 1. ``fast`` writes gaps as bytes and differences of bit patterns instead of values. ``small`` uses
what the receiver already knows, the old exponent, and entropy codes the rest (:mod:`dist_lib.pulse.small`). ``full``
is no codec of changes: all words of a segment in byte planes, for tensors that the base does not have.

A segment without changes is empty. Any other begins with the number of changed cells (LEB128). Then follow:

========= =============================================================================================================
``paper`` bytes of a row delta and of a column delta (1 byte each); one zstd frame: row deltas, column deltas, values
``fast``  bytes of escapes, number of wide differences (LEB128); one zstd frame: gaps less one (a byte each, 255 for an
          escape), escapes (LEB128), low bytes of zigzagged differences, what is left of wide ones in byte planes
``small`` classes, parameters, ranks, tables and differences: see :mod:`dist_lib.pulse.small`
========= =============================================================================================================

A segment is at most 2^22 consecutive cells of one tensor, so memory stays bounded and positions fit 32 bits in a
tensor of any size. Differences are exact integers modulo 2^bits: they must be applied once and to the right base,
which the digests of a patch guarantee; absolute values may be applied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_lib.pulse.errors import MissingPackageError
from dist_lib.pulse.state import TensorSpec
from dist_lib.pulse.wire import Reader, Words, Writer, pack, planes, unpack, unplanes, unzigzag, zigzag

SEGMENT = 1 << 22


def kernels() -> Any:
    """The compiled loops.

    Raises:
        MissingPackageError: Numba is not installed.
    """
    try:
        from dist_lib.pulse import _kernels
    except ImportError as error:
        raise MissingPackageError("numba", "coding a patch") from error
    return _kernels


@dataclass(frozen=True)
class Place:
    """Where a segment lies: what tensor it is of, and its first cell."""

    spec: TensorSpec
    start: int

    @property
    def row(self) -> int:
        """Cells of a row when the tensor is seen as a matrix: one row for each index of its first dimension."""
        shape = self.spec.shape
        rows = shape[0] if len(shape) > 1 else 1
        return max(1, self.spec.cells // max(1, rows))


@dataclass(frozen=True)
class Change:
    """Changed cells of a segment of ``cells``: ``positions`` (uint32, ascending) and words ``before`` and ``after``."""

    cells: int
    positions: Words
    before: Words
    after: Words


def _narrowest(values: Words, least: int) -> np.dtype[Any]:
    most = int(values.max(initial=0))
    return np.dtype(next(f"<u{w}" for w in (1, 2, 4, 8) if w >= least and most < 1 << (8 * w)))


def _paper_encode(out: Writer, old: Words | None, change: Change, place: Place) -> None:
    flat = change.positions.astype(np.int64) + (place.start % place.row)
    rows, columns = np.divmod(flat, place.row)
    row_step = np.diff(rows, prepend=0)
    same = row_step == 0
    same[0] = False
    column_step = np.where(same, np.diff(columns, prepend=0), columns)
    row_step, column_step = (a.astype(_narrowest(a, w)) for a, w in ((row_step, 1), (column_step, 2)))
    out.byte(row_step.itemsize)
    out.byte(column_step.itemsize)
    out.raw(pack(row_step.tobytes() + column_step.tobytes() + change.after.tobytes()))


def _paper_decode(data: Reader, old: Words, count: int, place: Place, out: Words) -> None:
    kinds = data.byte(8), data.byte(8)
    if kinds[0] not in (1, 2, 4) or kinds[1] not in (2, 4, 8):
        raise data.fail(f"indices of {kinds} bytes")
    width = old.itemsize
    content = unpack(data.rest(), count * (sum(kinds) + width), data.what)
    ends = count * kinds[0], count * sum(kinds)
    row_step = content[: ends[0]].view(f"<u{kinds[0]}")
    column_step = content[ends[0] : ends[1]].view(f"<u{kinds[1]}").astype(np.uint64)
    if (_narrowest(row_step, 1).itemsize, _narrowest(column_step, 2).itemsize) != kinds:
        raise data.fail("indices in a wider type than they need")
    if int(row_step.astype(np.uint64).sum()) > old.size or int(column_step.max()) >= place.row:
        raise data.fail("indices outside the segment")
    steps = column_step.astype(np.int64)
    turn = row_step > 0
    turn[0] = True
    if not bool((steps[~turn] > 0).all()):
        raise data.fail("indices that do not increase")
    reached = np.cumsum(steps)
    carried = np.where(turn, reached - steps, 0)
    columns = reached - np.maximum.accumulate(carried)
    flat = np.cumsum(row_step, dtype=np.int64) * place.row + columns - place.start % place.row
    if int(columns.max()) >= place.row or int(flat[0]) < 0 or int(flat[-1]) >= old.size:
        raise data.fail("indices outside the segment")
    values = content[ends[1] :].view(old.dtype)
    if bool((old[flat] == values).any()):
        raise data.fail("a change that changes nothing")
    np.copyto(out, old)
    out[flat] = values


def _fast_encode(out: Writer, old: Words | None, change: Change, place: Place) -> None:
    count, width = change.positions.size, change.before.itemsize
    gaps, escapes = np.empty(count, np.uint8), np.empty(5 * (change.cells // 255 + 1), np.uint8)
    used = kernels().gap_pack(change.positions, gaps, escapes)
    z = zigzag(change.before, change.after)
    wide = (z[z >= 255] - z.dtype.type(255)) if width == 2 else z[:0]
    low = np.minimum(z, 255).astype(np.uint8) if width == 2 else planes(z)
    out.number(used)
    out.number(wide.size)
    out.raw(pack(b"".join(a.tobytes() for a in (gaps, escapes[:used], low, planes(wide)))))


def _fast_decode(data: Reader, old: Words, count: int, place: Place, out: Words) -> None:
    width = old.itemsize
    used, wide = data.number(5 * (old.size // 255 + 1)), data.number(count if width == 2 else 0)
    low = count if width == 2 else count * width
    content = unpack(data.rest(), count + used + low + wide * width, data.what)
    positions = np.empty(count, np.uint32)
    parts = np.split(content, np.cumsum([count, used, low]))
    if kernels().gap_unpack(parts[0], parts[1], old.size, positions) < 0:
        raise data.fail("gaps that leave the segment or are not canonical")
    if width == 2:
        z = parts[2].astype(np.uint16)
        escaped = z == 255
        rest = unplanes(parts[3], 2)
        if int(escaped.sum()) != wide or int(rest.max(initial=0)) > 65535 - 255:
            raise data.fail("escapes that do not match")
        z[escaped] += rest
    else:
        z = unplanes(parts[2], width)
    if not bool(z.all()):
        raise data.fail("a change that changes nothing")
    np.copyto(out, old)
    out[positions] = unzigzag(old[positions], z)


def _small_encode(out: Writer, old: Words | None, change: Change, place: Place) -> None:
    from dist_lib.pulse.small import encode

    if old is None:
        raise ValueError("the small codec ranks changed cells among all: it needs the words of the base")
    encode(out, old, change, place.spec.dtype)


def _small_decode(data: Reader, old: Words, count: int, place: Place, out: Words) -> None:
    from dist_lib.pulse.small import decode

    decode(data, old, count, place.spec.dtype, out)


@dataclass(frozen=True)
class Codec:
    """A name, its number in the format, and the two directions for one segment; ``decode`` writes all words of the
    result. Only with ``needs_base`` does ``encode`` look at words that did not change."""

    name: str
    number: int
    encode: Callable[[Writer, Words | None, Change, Place], None]
    decode: Callable[[Reader, Words, int, Place, Words], None]
    needs_base: bool = False


CODECS: Mapping[str, Codec] = {
    c.name: c
    for c in (
        Codec("paper", 1, _paper_encode, _paper_decode),
        Codec("fast", 2, _fast_encode, _fast_decode),
        Codec("small", 4, _small_encode, _small_decode, needs_base=True),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of this name.

    Raises:
        ValueError: there is none; the message lists all.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"there is no codec {name!r}; choose one of {', '.join(CODECS)}") from None


def find_changes(old: Words, new: Words) -> Change:
    """Where the bits of two arrays (1-D, one type, at most 2^32 cells) differ."""
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    room = old.size // 16 + 64
    while True:  # a second time only where more than a sixteenth changed
        positions, before, after = np.empty(room, np.uint32), np.empty(room, old.dtype), np.empty(room, old.dtype)
        found = int(kernels().changed(old, new, positions, before, after))
        if found <= room:
            return Change(old.size, positions[:found], before[:found], after[:found])
        room = found


def encode_change(codec: Codec, old: Words | None, change: Change, place: Place) -> bytes:
    """Code the changes of a segment; nothing for none. ``old``: its words before, for a codec that needs its base."""
    if change.positions.size == 0:
        return b""
    out = Writer()
    out.number(change.positions.size)
    codec.encode(out, old, change, place)
    return out.done()


def encode_segment(codec: Codec, old: Words, new: Words, place: Place) -> bytes:
    """Code the change from ``old`` to ``new`` (1-D words of one segment); nothing for no change."""
    return encode_change(codec, old, find_changes(old, new), place)


def decode_segment(codec: Codec, data: memoryview, old: Words, place: Place, out: Words | None = None) -> Words:
    """The new words of a segment, in ``out`` (None: in memory of their own).

    Raises:
        CorruptPatchError: these bytes are not what :func:`encode_segment` writes for any change of ``old``; ``out`` may
            have been written to.
    """
    if out is None:
        out = np.empty_like(old)
    if not data:
        np.copyto(out, old)
        return out
    reader = Reader(data, f"segment at cell {place.start}")
    count = reader.number(old.size)
    if count == 0:
        raise reader.fail("an empty change that is written out")
    codec.decode(reader, old, count, place, out)
    reader.end()
    return out


def encode_full(new: Words) -> bytes:
    """All words of a segment in byte planes, compressed."""
    return pack(planes(new))


def decode_full(data: memoryview, cells: int, width: int, what: str) -> Words:
    """Inverse of :func:`encode_full` for ``cells`` words of ``width`` bytes.

    Raises:
        CorruptPatchError: see :func:`~dist_lib.pulse.wire.unpack`.
    """
    return unplanes(unpack(data, cells * width, what), width)
