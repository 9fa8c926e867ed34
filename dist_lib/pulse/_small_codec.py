"""The ``small`` codec of one segment in one compiled call, so that two threads do not wait for the interpreter's lock.

What it does is said in :mod:`dist_lib.pulse.small`; the loops are in the modules imported here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dist_lib.pulse._kernels import BAD, OK, Array, compiled, i64
from dist_lib.pulse._rans import (
    cost,
    normalise,
    rans_pack,
    rans_unpack,
    read_tables,
    spread,
    tally_symbols,
    write_tables,
)
from dist_lib.pulse._small_kernels import pack_bits, place, rank, select, unpack_ranks
from dist_lib.pulse._small_plan import (
    assign_groups,
    choose_classes,
    choose_parameters,
    make_groups,
    read_classes,
    read_number,
    tally_exponents,
    write_classes,
    write_number,
)

SYMBOLS = 185  # below 128 a difference itself, then one for each bit length from 8 to 64
SCALE = 4096
GROUP = 512  # changed cells that a frequency table of a group must serve
MOST_CLASSES = 24
CLASSES, RANKS, MEMBERS, KIND, TABLES, VALUES, LOW_BITS = -1, -2, -3, -4, -5, -6, -7  # what does not decode


@compiled
def write_values(symbols: Array, groups: Array, number: Any, standard: Array, out: Array) -> Any:
    """Kind of tables (standard 0, one for each group 1, one for all 2: the cheapest), tables, words, stream; bytes."""
    seen = np.zeros((number, SYMBOLS), np.int64)
    tally_symbols(symbols, groups, seen)
    total = seen.sum(0).reshape(1, SYMBOLS)
    tables, one = np.empty((number, SYMBOLS), np.int64), np.empty((1, SYMBOLS), np.int64)
    header, short = np.empty(4 * tables.size, np.uint8), np.empty(4 * one.size, np.uint8)
    normalise(seen, SCALE, tables)
    normalise(total, SCALE, one)
    header = header[: write_tables(tables, header)]
    short = short[: write_tables(one, short)]
    each = cost(tables, seen, SCALE) + 8 * header.size
    together = cost(one, total, SCALE) + 8 * short.size if number > 1 else each
    kind = 0
    if min(each, together) < cost(standard, total, SCALE):
        kind = 2 if together < each else 1
    if kind == 2:
        tables, header = one, short
    if kind == 0:
        tables, header = standard, header[:0]
    if kind != 1:
        groups = np.zeros(groups.size, np.uint8)
    out[0] = kind
    out[1 : 1 + header.size] = header
    freq, start = np.empty(tables.shape, np.uint32), np.empty(tables.shape, np.uint32)
    spread(tables, freq, start, np.empty((tables.shape[0], SCALE), np.uint8))
    words = np.empty(symbols.size + 8, np.uint16)
    top = rans_pack(symbols, groups, freq, start, words)
    at = write_number(out, 1 + header.size, words.size - top)
    for i in range(top, words.size):
        out[at], out[at + 1] = words[i] & 255, words[i] >> 8
        at += 2
    return at


@compiled
def read_values(data: Array, groups: Array, number: Any, standard: Array, symbols: Array) -> Any:
    """Inverse of ``write_values``; OK, or what does not decode."""
    if data.size == 0 or data[0] > 2 or (data[0] == 2 and number == 1):
        return KIND
    kind, at = data[0], 1
    tables = standard
    if kind > 0:
        tables = np.zeros((number if kind == 1 else 1, SYMBOLS), np.int64)
        used = read_tables(data[1:], SCALE, tables)
        if used < 0:
            return TABLES
        at += used
    if kind != 1:
        groups = np.zeros(groups.size, np.uint8)
    size, at = read_number(data, at, groups.size + 8)
    if size < 0 or data.size - at != 2 * size:
        return VALUES
    words = np.empty(size, np.uint16)
    for i in range(size):
        words[i] = i64(data[at + 2 * i]) | (i64(data[at + 2 * i + 1]) << 8)
    freq, start = np.empty(tables.shape, np.uint32), np.empty(tables.shape, np.uint32)
    lookup = np.empty((tables.shape[0], SCALE), np.uint8)
    spread(tables, freq, start, lookup)
    return OK if rans_unpack(words, groups, freq, start, lookup, symbols) == OK else VALUES


@compiled
def encode(old: Array, positions: Array, before: Array, after: Array, exponent: Any, pair: Any, standard: Array) -> Any:
    """The bytes of a segment's changes. ``exponent`` and ``pair``: (shift, mask) of exponents and of pairs of them."""
    count = positions.size
    by_exponent, group_of = np.zeros(exponent[1] + 1, np.int64), np.empty(exponent[1] + 1, np.uint8)
    tally_exponents(before, exponent[0], exponent[1], by_exponent)
    counts, sizes = np.zeros(MOST_CLASSES, np.int64), np.zeros(MOST_CLASSES, np.int64)
    parameters = np.zeros(MOST_CLASSES, np.int64)
    first, classes = choose_classes(by_exponent, MOST_CLASSES, counts)
    counts = counts[:classes]
    used, end = np.flatnonzero(counts), np.cumsum(counts)
    begin = end - counts
    number = make_groups(by_exponent, GROUP, group_of)
    ranks, z = np.empty(count, np.uint32), np.empty_like(before)
    groups, symbols = np.empty(count, np.uint8), np.empty(count, np.uint8)
    how = (pair[0], pair[1], first, classes - 1)
    extra = rank(
        old, positions, before, after, how, used, exponent, group_of, begin.copy(), sizes, ranks, groups, symbols, z
    )
    most = (choose_parameters(counts, sizes, parameters) + extra) // 8 + 8
    bits = np.empty(most, np.uint8)
    nbytes = pack_bits(ranks, used, begin, end, sizes, parameters, symbols, z, bits)
    out = np.empty(64 + 11 * classes + nbytes + 4 * SYMBOLS * number + 2 * (count + 8), np.uint8)
    at = write_classes(first, counts, sizes, parameters, nbytes, out)
    out[at : at + nbytes] = bits[:nbytes]
    at += nbytes
    return out[: at + write_values(symbols, groups, number, standard, out[at:])]


@compiled
def decode(data: Array, old: Array, count: Any, exponent: Any, pair: Any, standard: Array, out: Array) -> Any:
    """Inverse of ``encode``: ``old`` with ``count`` changed cells, to ``out``; OK, or what is wrong."""
    counts, sizes = np.zeros(MOST_CLASSES, np.int64), np.zeros(MOST_CLASSES, np.int64)
    parameters = np.zeros(MOST_CLASSES, np.int64)
    most = MOST_CLASSES if pair[1] > 0 else 1
    at, first, classes, nbytes = read_classes(data, count, old.size, pair[1], most, counts, sizes, parameters)
    if at < 0:
        return CLASSES
    counts, bits = counts[:classes], data[at : at + nbytes]
    used, end = np.flatnonzero(counts), np.cumsum(counts)
    begin = end - counts
    ranks, positions, before = np.empty(count, np.uint32), np.empty(count, np.uint32), np.empty(count, old.dtype)
    bit = unpack_ranks(bits, used, begin, end, sizes, parameters, ranks)
    if bit == BAD:
        return RANKS
    how = (pair[0], pair[1], first, classes - 1)
    if select(old, how, used, ranks, begin, end, sizes, positions, before, out) == BAD:
        return MEMBERS
    by_exponent, group_of = np.zeros(exponent[1] + 1, np.int64), np.empty(exponent[1] + 1, np.uint8)
    tally_exponents(before, exponent[0], exponent[1], by_exponent)
    number = make_groups(by_exponent, GROUP, group_of)
    groups, symbols = np.empty(count, np.uint8), np.empty(count, np.uint8)
    assign_groups(before, exponent, group_of, groups)
    failed = read_values(data[at + nbytes :], groups, number, standard, symbols)
    if failed != OK:
        return failed
    bit = place(bits, bit, symbols, positions, before, out)
    if bit == BAD or bits.size != (bit + 7) // 8 or (bit % 8 > 0 and bits[bits.size - 1] >> (bit % 8) > 0):
        return LOW_BITS
    return OK
