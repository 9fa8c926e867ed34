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

import numpy as np
import torch

from dist_lib.pulse.codecs import kernels
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


def _choose(exponents: Words) -> tuple[int, int]:
    """First exponent and number of classes: the rarest 1 % below are one class, all above the highest another."""
    found = np.bincount(exponents)
    first = int(np.searchsorted(np.cumsum(found), exponents.size // 100, side="right"))
    last = found.size - 1
    first = max(first, last + 2 - MOST_CLASSES)
    return first, last + 2 - first


def _class_bits(dtype: torch.dtype) -> tuple[int, int]:
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    return (shift + 1, mask >> 1) if mask else (0, 0)


def _exponents(cells: Words, dtype: torch.dtype) -> Words:
    """Exponent of each cell, int64; 0 for dtypes without one."""
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    exponents: Words = ((cells >> cells.dtype.type(shift)) & cells.dtype.type(mask)).astype(np.int64)
    return exponents


def _groups(exponents: Words) -> tuple[Words, int]:
    """Group of each changed cell and the number of groups.

    Neighbouring exponents are joined until a group has enough changed cells for a frequency table of its own.
    """
    counts = np.bincount(exponents)
    of, group, held, left = np.zeros(counts.size, np.uint8), 0, 0, exponents.size
    for e, count in enumerate(counts.tolist()):
        of[e] = group
        held, left = held + count, left - count
        if held >= GROUP and left >= GROUP and group < 255:
            group, held = group + 1, 0
    return of[exponents], group + 1


def _normalise(counts: Words) -> Words:
    """Frequencies that sum to 4096, none of a used symbol zero; deterministic."""
    freq = np.where(counts > 0, np.maximum(1, counts.astype(np.int64) * SCALE // max(1, int(counts.sum()))), 0)
    spare = SCALE - int(freq.sum())
    while spare:
        largest = int(freq.argmax())
        change = max(spare, 1 - int(freq[largest])) if spare < 0 else spare
        freq[largest] += change if spare > 0 else max(change, -(int(freq[largest]) // 2))
        spare = SCALE - int(freq.sum())
    return freq


@lru_cache(maxsize=1)
def _standard() -> Words:
    """The table for few changes, which has to be written nowhere: falls with the square of the distance."""
    counts = np.zeros(SYMBOLS, np.int64)
    distance = (np.arange(1, 128) + 1) // 2
    counts[1:128] = 100_000 // (distance * distance)
    counts[128:] = 1
    return _normalise(counts)


def _write_tables(out: Writer, tables: Words) -> None:
    """Each table as the number of its symbols, their distances, and all their frequencies but the last, less one."""
    for table in tables:
        used = np.flatnonzero(table)
        out.numbers([used.size, *np.diff(used, prepend=0).tolist(), *(table[used[:-1]] - 1).tolist()])


def _read_tables(data: Reader, groups: int) -> Words:
    tables = np.zeros((groups, SYMBOLS), np.int64)
    for table in tables:
        used = data.number(SYMBOLS - 1)
        steps = np.array(data.numbers(used, SYMBOLS - 1), np.int64)
        symbols = np.cumsum(steps)
        if used == 0 or int(steps.min()) == 0 or int(symbols[-1]) >= SYMBOLS:
            raise data.fail("a table without symbols, with one named twice, or with one that there is not")
        written = np.array(data.numbers(used - 1, SCALE), np.int64) + 1
        if int(written.sum()) >= SCALE:
            raise data.fail("a table that sums to more than it may")
        table[symbols[:-1]] = written
        table[symbols[-1]] = SCALE - int(written.sum())
    return tables


def _bits(tables: Words, counts: Words) -> float:
    used = counts > 0
    return float(-(counts[used] * np.log2(tables[used] / SCALE)).sum())


def _rice_parameter(members: int, coded: int) -> int:
    """Low bits of a gap, best for geometric gaps of this mean: the least k with a chance below 0.618 of another 2^k."""
    return max(0, math.ceil(math.log2(0.4812 * members / max(1, coded)))) if members else 0


def encode(out: Writer, old: Words, z: Words, positions: Words, dtype: torch.dtype) -> None:
    """Write one segment's changes.

    Args:
        out: what to append to; the number of changes is written already.
        old: words of the base, 1-D.
        z: zigzagged differences at ``positions``, never 0.
        positions: changed cells, ascending, uint32.
        dtype: of the tensor.
    """
    k = kernels()
    shift, mask = _class_bits(dtype)
    exponents = _exponents(old[positions], dtype)
    first, classes = _choose(exponents >> 1) if mask else (0, 1)
    of, ranks, sizes = np.empty(z.size, np.uint8), np.empty(z.size, np.uint32), np.zeros(classes, np.int64)
    k.rank(old, shift, mask, first, classes, positions, of, ranks, sizes)
    order = np.argsort(of, kind="stable")
    z, ranks, exponents = z[order].astype(np.uint64), ranks[order], exponents[order]
    counts = np.bincount(of, minlength=classes)
    out.number(first)
    out.number(classes)
    coded, stop = [], 0
    for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
        out.number(count)
        if not count:
            continue
        out.number(size)
        begin, stop = stop, stop + count
        chosen = ranks[begin:stop]
        if 2 * count > size:
            chosen = np.empty(size - count, np.uint32)
            k.complement(ranks[begin:stop], size, chosen)
        coded.append((chosen, _rice_parameter(size, chosen.size)))
    symbols = np.empty(z.size, np.uint8)
    extra = k.symbols_of(z, symbols)
    need = extra + sum(int(r[-1]) // (1 << p) + r.size * (p + 2) for r, p in coded if r.size)
    bits = np.zeros(need // 8 + 2, np.uint8)
    at = 0
    for chosen, parameter in coded:
        out.byte(parameter)
        at = k.rice_pack(chosen, parameter, bits, at)
    at = k.extra_pack(z, symbols, bits, at)
    out.number(-(-at // 8))
    out.raw(bits[: -(-at // 8)])
    _write_values(out, symbols, *_groups(exponents))


def _write_values(out: Writer, symbols: Words, groups: Words, number: int) -> None:
    seen = np.bincount(groups.astype(np.int64) * SYMBOLS + symbols, minlength=number * SYMBOLS).reshape(number, SYMBOLS)
    tables = np.stack([_normalise(s) for s in seen])
    description = Writer()
    _write_tables(description, tables)
    header = description.done()
    standard = np.tile(_standard(), (number, 1))
    own = _bits(tables, seen) + 8 * len(header) < _bits(standard, seen)
    tables = tables if own else standard
    out.byte(int(own))
    out.raw(header if own else b"")
    words = np.empty(symbols.size + 8, np.uint16)
    top = kernels().rans_pack(symbols, groups, tables.astype(np.uint32), _starts(tables), words)
    out.number(words.size - top)
    out.raw(words[top:].astype("<u2"))


def _starts(tables: Words) -> Words:
    return (np.cumsum(tables, 1) - tables).astype(np.uint32)


def _read_values(data: Reader, groups: Words, number: int) -> Words:
    tables = _read_tables(data, number) if data.byte(1) else np.tile(_standard(), (number, 1))
    words = data.number(groups.size + 8)
    stream = np.frombuffer(bytearray(data.raw(2 * words)), "<u2")
    lookup = np.stack([np.repeat(np.arange(SYMBOLS, dtype=np.uint8), t) for t in tables])
    symbols = np.empty(groups.size, np.uint8)
    freq, starts = tables.astype(np.uint32), _starts(tables)
    if kernels().rans_unpack(stream, groups, freq, starts, lookup, symbols) < 0:
        raise data.fail("differences that do not decode")
    return symbols


def decode(data: Reader, old: Words, count: int, dtype: torch.dtype) -> tuple[Words, Words]:
    """Inverse of :func:`encode`: positions (each once, grouped by class) and differences in the base's word type.

    Raises:
        CorruptPatchError: bytes that :func:`encode` writes for no change of ``old``.
    """
    k = kernels()
    shift, mask = _class_bits(dtype)
    first, classes = data.number(mask), data.number(MOST_CLASSES if mask else 1)
    counts, sizes = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    for c in range(classes):
        counts[c] = data.number(count)
        sizes[c] = data.number(old.size) if counts[c] else 0
    if int(counts.sum()) != count or bool((counts > sizes).any()) or int(sizes.sum()) > old.size:
        raise data.fail("classes that do not add up")
    used = np.flatnonzero(counts)
    parameters = [data.byte(31) for _ in used]
    bits = np.frombuffer(bytearray(data.raw(data.number(data.left))), np.uint8)
    ranks = np.empty(count, np.uint32)
    ends = np.cumsum(counts)
    begins = ends - counts
    at = 0
    for c, parameter in zip(used.tolist(), parameters, strict=True):
        here, size = ranks[begins[c] : ends[c]], int(sizes[c])
        flip = 2 * here.size > size
        written = np.empty(size - here.size, np.uint32) if flip else here
        at = int(k.rice_unpack(bits, at, parameter, size, written))
        if at < 0 or parameter != _rice_parameter(size, written.size):
            raise data.fail("ranks that do not decode")
        if flip:
            k.complement(written, size, here)
    positions, found = np.empty(count, np.uint32), np.zeros(classes, np.int64)
    k.select(old, shift, mask, first, ranks, begins, ends, counts, found, positions)
    if not np.array_equal(begins, ends) or not np.array_equal(found, sizes):
        raise data.fail("ranks outside their class")
    symbols = _read_values(data, *_groups(_exponents(old[positions], dtype)))
    z = np.empty(count, np.uint64)
    at = k.extra_unpack(bits, at, symbols, np.uint64(2 ** (8 * old.itemsize) - 1), z)
    if at < 0 or bits.size != -(-at // 8) or (at % 8 and int(bits[-1]) >> (at % 8)):
        raise data.fail("differences that do not decode")
    return positions, z.astype(old.dtype)
