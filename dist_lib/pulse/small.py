"""The smallest codec: what the receiver knows already is not sent.

A cell changes the more likely, the smaller its old exponent is. Cells are grouped into classes by that exponent, the
ranks of changed cells inside each class are Rice coded with a parameter of the class (of unchanged ones where more
than half changed), and differences of bit patterns are coded by rANS with a frequency table for each group of
classes: a large weight only ever moves by one spacing, a small one by many. The decoder derives classes, their sizes
and groups from the base; every other degree of freedom is either written or refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dist_lib.pulse.codecs import Change, kernels
from dist_lib.pulse.wire import Reader, Words, Writer

# (shift, mask) of the exponent in a cell; other dtypes have none. Ranks are coded in classes of two neighbouring
# exponents: half the work of single ones for about a fiftieth of the bytes.
EXPONENTS: Mapping[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (7, 255),
    torch.float16: (10, 31),
    torch.float32: (23, 255),
    torch.float64: (52, 2047),
    torch.float8_e4m3fn: (3, 15),
    torch.float8_e5m2: (2, 31),
}
MOST_CLASSES = 24
SYMBOLS = 185  # below 128 a difference itself, then one for each bit length from 8 to 64
SCALE = 4096
GROUP = 512  # changed cells that a frequency table must serve


def _choose(found: Words) -> tuple[int, int]:
    """First class and number of classes, of the numbers of changed cells by pairs of exponents.

    The rarest 1 % below are one class, all above the highest another.
    """
    first = int(np.searchsorted(np.cumsum(found), int(found.sum()) // 100, side="right"))
    last = int(np.flatnonzero(found)[-1])
    first = max(first, last + 2 - MOST_CLASSES)
    return first, last + 2 - first


def _class_bits(dtype: torch.dtype) -> tuple[int, int]:
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    return (shift + 1, mask >> 1) if mask else (0, 0)


def _loops() -> Any:
    kernels()  # says what is missing, if something is
    from dist_lib.pulse import _small_kernels

    return _small_kernels


def _rans() -> Any:
    kernels()
    from dist_lib.pulse import _rans

    return _rans


def _fold(counts: Words, first: int, classes: int) -> Words:
    """Numbers of cells by class, of their numbers by exponent."""
    if classes == 1:
        return np.array([counts.sum()], np.int64)
    of = np.clip((np.arange(counts.size) >> 1) - first, 0, classes - 1)
    return np.bincount(of, counts, classes).astype(np.int64)


@lru_cache(maxsize=1)
def _standard() -> Words:
    """The table for few changes, which has to be written nowhere: falls with the square of the distance."""
    counts = np.zeros(SYMBOLS, np.int64)
    distance = (np.arange(1, 128) + 1) // 2
    counts[1:128] = 100_000 // (distance * distance)
    counts[128:] = 1
    table = np.empty((1, SYMBOLS), np.int64)
    _rans().normalise(counts[None], SCALE, table)
    standard: Words = table[0]
    return standard


def _bits(tables: Words, counts: Words) -> float:
    used = counts > 0
    return float(-(counts[used] * np.log2(tables[used] / SCALE)).sum())


def _rice_parameter(members: int, coded: int) -> int:
    """Low bits of a gap, best for geometric gaps of this mean: the least k with a chance below 0.618 of another 2^k."""
    return max(0, math.ceil(math.log2(0.4812 * members / max(1, coded)))) if members else 0


def encode(out: Writer, old: Words, change: Change, dtype: torch.dtype) -> None:
    """Write one segment's changes.

    Args:
        out: what to append to; the number of changes is written already.
        old: words of the base, 1-D, contiguous.
        change: its changed cells.
        dtype: of the tensor.
    """
    loops = _loops()
    exponent, count = EXPONENTS.get(dtype, (0, 0)), change.positions.size
    by_exponent = np.zeros(exponent[1] + 1, np.int64)
    loops.tally_exponents(change.before, *exponent, by_exponent)
    first, classes = _choose(by_exponent.reshape(-1, 2).sum(1)) if exponent[1] else (0, 1)
    counts = _fold(by_exponent, first, classes)
    used = np.flatnonzero(counts)
    end = np.cumsum(counts)
    begin = end - counts
    group_of = np.empty(by_exponent.size, np.uint8)
    number = int(loops.make_groups(by_exponent, GROUP, group_of))
    sizes, ranks = np.zeros(classes, np.int64), np.empty(count, np.uint32)
    groups, symbols, z = np.empty(count, np.uint8), np.empty(count, np.uint8), np.empty(count, old.dtype)
    shift, mask = _class_bits(dtype)
    how = (shift, mask, first, classes - 1)
    at = begin.copy()
    cells = change.positions, change.before, change.after
    extra = loops.rank(old, *cells, how, used, exponent, group_of, at, sizes, ranks, groups, symbols, z)
    out.number(first)
    out.number(classes)
    parameters, need = np.zeros(classes, np.int64), int(extra)
    for c, (n, size) in enumerate(zip(counts.tolist(), sizes.tolist(), strict=True)):
        out.numbers((n, size) if n else (n,))
        if n:
            written = min(n, size - n)
            parameters[c] = _rice_parameter(size, written)
            need += (size >> int(parameters[c])) + written * (int(parameters[c]) + 1)
    for c in used.tolist():
        out.byte(int(parameters[c]))
    bits = np.empty(need // 8 + 8, np.uint8)
    nbytes = int(loops.pack_bits(ranks, used, begin, end, sizes, parameters, symbols, z, bits))
    out.number(nbytes)
    out.raw(bits[:nbytes])
    _write_values(out, symbols, groups, number)


def _write_values(out: Writer, symbols: Words, groups: Words, number: int) -> None:
    rans = _rans()
    seen, tables = np.zeros((number, SYMBOLS), np.int64), np.empty((number, SYMBOLS), np.int64)
    rans.tally_symbols(symbols, groups, seen)
    rans.normalise(seen, SCALE, tables)
    description = np.empty(4 * tables.size, np.uint8)
    header = description[: int(rans.write_tables(tables, description))]
    standard = np.tile(_standard(), (number, 1))
    own = _bits(tables, seen) + 8 * header.size < _bits(standard, seen)
    tables = tables if own else standard
    out.byte(int(own))
    out.raw(header[: header.size * own])
    words = np.empty(symbols.size + 8, np.uint16)
    freq, starts, _ = _spread(tables)
    top = rans.rans_pack(symbols, groups, freq, starts, words)
    out.number(words.size - top)
    out.raw(words[top:].astype("<u2"))


def _spread(tables: Words) -> tuple[Words, Words, Words]:
    """Frequencies, first slots (both uint32) and the symbols of all slots (uint8) of each table."""
    freq, starts = np.empty(tables.shape, np.uint32), np.empty(tables.shape, np.uint32)
    lookup = np.empty((tables.shape[0], SCALE), np.uint8)
    _rans().spread(tables, freq, starts, lookup)
    return freq, starts, lookup


def _read_values(data: Reader, groups: Words, number: int) -> Words:
    own = data.byte(1)
    rest = np.frombuffer(bytearray(data.rest()), np.uint8)
    tables, used = np.zeros((number, SYMBOLS), np.int64), 0
    if own:
        used = int(_rans().read_tables(rest, SCALE, tables))
        if used < 0:
            raise data.fail("frequencies that are none")
    else:
        tables[:] = _standard()
    left = Reader(rest[used:].tobytes(), data.what)
    words = left.number(groups.size + 8)
    stream = np.frombuffer(bytearray(left.raw(2 * words)), "<u2")
    left.end()
    symbols = np.empty(groups.size, np.uint8)
    if _rans().rans_unpack(stream, groups, *_spread(tables), symbols) < 0:
        raise data.fail("differences that do not decode")
    return symbols


def decode(data: Reader, old: Words, count: int, dtype: torch.dtype, out: Words) -> None:
    """Inverse of :func:`encode`: write ``count`` changed words over ``out``, a copy of ``old``.

    Raises:
        CorruptPatchError: bytes that :func:`encode` writes for no change of ``old``; some cells may have been written.
    """
    loops = _loops()
    exponent, (shift, mask) = EXPONENTS.get(dtype, (0, 0)), _class_bits(dtype)
    first, classes = data.number(mask), data.number(MOST_CLASSES if mask else 1)
    counts, sizes = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    for c in range(classes):
        counts[c] = data.number(count)
        sizes[c] = data.number(old.size) if counts[c] else 0
    if int(counts.sum()) != count or bool((counts > sizes).any()) or int(sizes.sum()) > old.size:
        raise data.fail("classes that do not add up")
    used = np.flatnonzero(counts)
    end = np.cumsum(counts)
    begin = end - counts
    parameters = np.zeros(classes, np.int64)
    for c in used.tolist():
        parameters[c] = data.byte(31)
        if parameters[c] != _rice_parameter(int(sizes[c]), int(min(counts[c], sizes[c] - counts[c]))):
            raise data.fail("a Rice parameter that does not follow from its class")
    bits = np.frombuffer(bytearray(data.raw(data.number(data.left))), np.uint8)
    ranks, positions = np.empty(count, np.uint32), np.empty(count, np.uint32)
    bit = int(loops.unpack_ranks(bits, used, begin, end, sizes, parameters, ranks))
    if bit < 0:
        raise data.fail("ranks that do not decode")
    before, how = np.empty(count, old.dtype), (shift, mask, first, classes - 1)
    if loops.select(old, how, used, ranks, begin, end, sizes, positions, before) < 0:
        raise data.fail("ranks outside their class")
    by_exponent = np.zeros(exponent[1] + 1, np.int64)
    loops.tally_exponents(before, *exponent, by_exponent)
    group_of, groups = np.empty(by_exponent.size, np.uint8), np.empty(count, np.uint8)
    number = int(loops.make_groups(by_exponent, GROUP, group_of))
    loops.assign_groups(before, exponent, group_of, groups)
    symbols = _read_values(data, groups, number)
    bit = int(loops.place(bits, bit, symbols, positions, before, out))
    if bit < 0 or bits.size != -(-bit // 8) or (bit % 8 and int(bits[-1]) >> (bit % 8)):
        raise data.fail("differences that do not decode")
