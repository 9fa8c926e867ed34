"""Compiled loops of an entropy coder with one frequency table for each group of symbols (rANS, one state).

Frequencies of a table sum to 4096. Tables are counted, normalised, written and read here too. What comes from outside
is checked: a table or a stream that the encoder would not have written is BAD.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from dist_lib.pulse._kernels import BAD, OK, Array, compiled, i64


@compiled
def tally_symbols(symbols: Array, groups: Array, seen: Array) -> None:
    """Count symbols by group."""
    for i in range(symbols.size):
        seen[groups[i], symbols[i]] += 1


@compiled
def normalise(seen: Array, scale: Any, tables: Array) -> None:
    """Frequencies that sum to ``scale`` in each row, none of a used symbol zero; what is spare goes to the largest."""
    for g in range(seen.shape[0]):
        total, spare = i64(0), i64(scale)
        for s in range(seen.shape[1]):
            total += seen[g, s]
        for s in range(seen.shape[1]):
            tables[g, s] = max(1, seen[g, s] * scale // max(1, total)) if seen[g, s] > 0 else 0
            spare -= tables[g, s]
        while spare != 0:
            largest = 0
            for s in range(seen.shape[1]):
                if tables[g, s] > tables[g, largest]:
                    largest = s
            change = max(spare, 1 - tables[g, largest], -(tables[g, largest] // 2)) if spare < 0 else spare
            tables[g, largest] += change
            spare -= change


@register_jitable
def _write(out: Array, at: Any, value: Any) -> Any:
    """A number below 2^14 as LEB128, shortest form."""
    if value >= 128:
        out[at] = (value & 127) | 128
        at += 1
        value >>= 7
    out[at] = value
    return at + 1


@register_jitable
def _read(data: Array, at: Any) -> Any:
    """Inverse of ``_write``: the number, or BAD, and what follows it."""
    if at >= data.size:
        return BAD, at
    value = i64(data[at])
    if value < 128:
        return value, at + 1
    if at + 1 >= data.size or data[at + 1] == 0 or data[at + 1] >= 128:
        return BAD, at
    return (value & 127) | (i64(data[at + 1]) << 7), at + 2


@compiled
def cost(tables: Array, seen: Array, scale: Any) -> Any:
    """Bits of these symbols in these tables."""
    bits = 0.0
    for g in range(seen.shape[0]):
        for s in range(seen.shape[1]):
            if seen[g, s] > 0:
                bits -= seen[g, s] * np.log2(tables[g, s] / scale)
    return bits


@compiled
def write_tables(tables: Array, out: Array) -> Any:
    """Each table as the number of its symbols, their distances, and all their frequencies but the last, less one.

    Returns the bytes used; ``out`` must have four for each entry of the tables.
    """
    at = 0
    for g in range(tables.shape[0]):
        number, last = 0, 0
        for s in range(tables.shape[1]):
            if tables[g, s] > 0:
                number += 1
        at = _write(out, at, number)
        for s in range(tables.shape[1]):
            if tables[g, s] > 0:
                at = _write(out, at, s - last)
                last = s
        for s in range(last):
            if tables[g, s] > 0:
                at = _write(out, at, tables[g, s] - 1)
    return at


@compiled
def read_tables(data: Array, scale: Any, tables: Array) -> Any:
    """Inverse of ``write_tables`` into zeros; the bytes used, or BAD for what it would not have written."""
    at, symbols = 0, np.empty(tables.shape[1], np.int64)
    for g in range(tables.shape[0]):
        number, at = _read(data, at)
        if number < 1 or number >= tables.shape[1]:
            return BAD
        symbol = 0
        for i in range(number):
            step, at = _read(data, at)
            symbol += step
            if step < 1 or symbol >= tables.shape[1]:
                return BAD
            symbols[i] = symbol
        left = i64(scale)
        for i in range(number - 1):
            frequency, at = _read(data, at)
            left -= frequency + 1
            if frequency < 0 or left < 1:
                return BAD
            tables[g, symbols[i]] = frequency + 1
        tables[g, symbol] = left
    return at


@compiled
def spread(tables: Array, freq: Array, start: Array, lookup: Array) -> None:
    """Of frequencies: the same in 32 bits, where each symbol begins, and the symbol of each slot."""
    for g in range(tables.shape[0]):
        at = 0
        for s in range(tables.shape[1]):
            freq[g, s] = tables[g, s]
            start[g, s] = at
            for slot in range(at, at + tables[g, s]):
                lookup[g, slot] = s
            at += tables[g, s]


@compiled
def rans_pack(symbols: Array, groups: Array, freq: Array, start: Array, out: Array) -> Any:
    """Code symbols from last to first with the table of each one's group; fills ``out`` from its end.

    Frequencies sum to 4096. The state lies in [2^16, 2^32) between symbols and is renormalised by 16 bits. Returns
    the index of the first used word.
    """
    state, top = np.uint64(1 << 16), out.size
    for i in range(symbols.size - 1, -1, -1):
        f = np.uint64(freq[groups[i], symbols[i]])
        if state >= f << np.uint64(20):
            top -= 1
            out[top] = np.uint16(state & np.uint64(0xFFFF))
            state >>= np.uint64(16)
        state = ((state // f) << np.uint64(12)) + (state % f) + np.uint64(start[groups[i], symbols[i]])
    out[top - 1] = np.uint16(state & np.uint64(0xFFFF))
    out[top - 2] = np.uint16(state >> np.uint64(16))
    return top - 2


@compiled
def rans_unpack(data: Array, groups: Array, freq: Array, start: Array, lookup: Array, symbols: Array) -> Any:
    """Inverse of ``rans_pack``; BAD unless all words are used and the state ends where it began."""
    if data.size < 2:
        return BAD
    state = (np.uint64(data[0]) << np.uint64(16)) | np.uint64(data[1])
    if state < np.uint64(1 << 16):
        return BAD
    used = 2
    for i in range(symbols.size):
        group, slot = groups[i], i64(state & np.uint64(4095))
        symbol = lookup[group, slot]
        symbols[i] = symbol
        state = np.uint64(freq[group, symbol]) * (state >> np.uint64(12)) + np.uint64(slot - start[group, symbol])
        if state < np.uint64(1 << 16):
            if used >= data.size:
                return BAD
            state = (state << np.uint64(16)) | np.uint64(data[used])
            used += 1
    return OK if used == data.size and state == np.uint64(1 << 16) else BAD
