"""Compiled loops of the ``small`` codec that find, rank and place cells: see :mod:`dist_lib.pulse.small`.

Everything is in the order of classes: class ``c`` owns the slots ``begin[c]`` to ``end[c]`` of every array with one
entry for each changed cell, and ``used`` lists the classes that have any. ``how`` is the tuple (shift, mask, first,
last) by which a cell's class follows from its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from dist_lib.pulse._kernels import BAD, OK, Array, compiled, i64
from dist_lib.pulse._vector import LANES, classify, copy, equal, lowest, ones

u64: Any = np.uint64
BLOCK = 256  # cells whose classes are found, and then counted, together
PARTS = BLOCK // LANES
NEVER: Any = 1 << 62  # above every rank


@register_jitable
def _classes(cells: Array, start: Any, how: Any, found: Array) -> None:
    """Classes of a block; what lies past the end of the segment is of class 255, which no cell has."""
    if start + BLOCK <= cells.size:
        for i in range(0, BLOCK, LANES):
            classify(cells, start + i, how, found, i)
        return
    for i in range(BLOCK):
        found[i] = 255
    for i in range(cells.size - start):
        found[i] = min(max((i64(cells[start + i] >> how[0]) & how[1]) - how[2], 0), how[3])


@register_jitable
def _copy(cells: Array, start: Any, out: Array) -> None:
    if start + BLOCK <= cells.size:
        for i in range(start, start + BLOCK, LANES):
            copy(cells, i, out)
        return
    for i in range(start, cells.size):
        out[i] = cells[i]


@register_jitable
def _members(found: Array, c: Any) -> Any:
    """How many cells of a block are of class ``c``."""
    count = 0
    for i in range(0, BLOCK, LANES):
        count += ones(equal(found, i, c))
    return count


@register_jitable
def _members_below(found: Array, c: Any, end: Any) -> Any:
    """How many of the first ``end`` cells of a block are of class ``c``."""
    count, whole = 0, end - end % LANES
    for i in range(0, whole, LANES):
        count += ones(equal(found, i, c))
    return count + ones(equal(found, whole, c) & ((u64(1) << u64(end - whole)) - u64(1)))


@register_jitable
def _length(value: Any) -> Any:
    length = 0
    while value > u64(0):
        value >>= u64(1)
        length += 1
    return length


@compiled
def rank(
    old: Array,
    positions: Array,
    before: Array,
    after: Array,
    how: Any,
    used: Array,
    exponent: Any,
    group_of: Array,
    at: Array,
    sizes: Array,
    ranks: Array,
    groups: Array,
    symbols: Array,
    z: Array,
) -> Any:
    """Everything that is coded of each changed cell, written to the slots of its class.

    ``at`` holds the first slot of each class, ``sizes`` its members so far (zeros); both are advanced. A symbol is the
    zigzagged difference itself below 128, else 120 plus its bits; returns how many bits below the highest those need.
    """
    found = np.empty(BLOCK, np.uint8)
    bits = u64(8 * old.itemsize)
    largest = ~u64(0) >> (u64(64) - bits)
    k, extra = 0, 0
    for start in range(0, old.size, BLOCK):
        _classes(old, start, how, found)
        while k < positions.size and positions[k] < start + BLOCK:
            p = i64(positions[k])
            c = i64(found[p - start])
            slot = at[c]
            at[c] = slot + 1
            ranks[slot] = sizes[c] + _members_below(found, c, p - start)
            groups[slot] = group_of[i64(before[k] >> exponent[0]) & exponent[1]]
            delta = (u64(after[k]) - u64(before[k])) & largest
            value = ((delta << u64(1)) & largest) ^ (largest * (delta >> (bits - u64(1))))
            z[slot] = value
            if value < u64(128):
                symbols[slot] = value
            else:
                length = _length(value)
                symbols[slot] = 120 + length
                extra += length - 1
            k += 1
        for i in range(used.size):
            sizes[used[i]] += _members(found, used[i])
    return extra


@register_jitable
def _emit(out: Array, at: Any, held: Any, fill: Any, value: Any, length: Any) -> Any:
    """Append at most 32 bits to fewer than 32 held ones; whole groups of four bytes are written out."""
    held |= value << u64(fill)
    fill += length
    if fill >= 32:
        for i in range(4):
            out[at + i] = np.uint8((held >> u64(8 * i)) & u64(255))
        at += 4
        held >>= u64(32)
        fill -= 32
    return at, held, fill


@register_jitable
def _emit_gap(out: Array, at: Any, held: Any, fill: Any, gap: Any, k: Any) -> Any:
    """A Rice code: the quotient in zeros, a one, ``k`` low bits."""
    q, low = gap >> k, u64(gap & ((1 << k) - 1))
    if q + 1 + k <= 32:
        return _emit(out, at, held, fill, (u64(1) << u64(q)) | (low << u64(q + 1)), q + 1 + k)
    while q > 0:
        at, held, fill = _emit(out, at, held, fill, u64(0), min(q, 32))
        q -= min(q, 32)
    at, held, fill = _emit(out, at, held, fill, u64(1), 1)
    return _emit(out, at, held, fill, low, k)


@compiled
def pack_bits(
    ranks: Array,
    used: Array,
    begin: Array,
    end: Array,
    sizes: Array,
    parameters: Array,
    symbols: Array,
    z: Array,
    out: Array,
) -> Any:
    """Write the ranks of each class (of unchanged cells where more than half changed), then all low bits of
    differences from 128; returns the bytes used. ``out`` must have room for them and four more."""
    at, held, fill = 0, u64(0), 0
    for u in range(used.size):
        c = used[u]
        k, last, size = parameters[c], -1, sizes[c]
        if 2 * (end[c] - begin[c]) <= size:
            for i in range(begin[c], end[c]):
                at, held, fill = _emit_gap(out, at, held, fill, i64(ranks[i]) - last - 1, k)
                last = i64(ranks[i])
            continue
        value = 0
        for i in range(begin[c], end[c] + 1):
            stop = i64(ranks[i]) if i < end[c] else size
            while value < stop:
                at, held, fill = _emit_gap(out, at, held, fill, value - last - 1, k)
                last = value
                value += 1
            value = stop + 1
    for i in range(symbols.size):
        if symbols[i] >= 128:
            length = i64(symbols[i]) - 121
            value_left = u64(z[i]) & ((u64(1) << u64(length)) - u64(1))
            if length > 32:
                at, held, fill = _emit(out, at, held, fill, value_left & u64(0xFFFFFFFF), 32)
                value_left >>= u64(32)
                length -= 32
            at, held, fill = _emit(out, at, held, fill, value_left, length)
    while fill > 0:
        out[at] = np.uint8(held & u64(255))
        held >>= u64(8)
        fill -= 8
        at += 1
    return at


@register_jitable
def _refill(data: Array, at: Any, held: Any, have: Any) -> Any:
    while have <= 56 and at < data.size:
        held |= u64(data[at]) << u64(have)
        at += 1
        have += 8
    return at, held, have


@compiled
def unpack_ranks(
    data: Array, used: Array, begin: Array, end: Array, sizes: Array, parameters: Array, ranks: Array
) -> Any:
    """The ranks that ``pack_bits`` wrote; returns the next bit, or BAD past the data or past a class."""
    at, held, have = 0, u64(0), 0
    for u in range(used.size):
        c = used[u]
        k, last, size, slot = parameters[c], -1, sizes[c], begin[c]
        flip = 2 * (end[c] - begin[c]) > size
        written = size - (end[c] - begin[c]) if flip else end[c] - begin[c]
        for _ in range(written):
            at, held, have = _refill(data, at, held, have)
            q = 0
            while held == u64(0):
                q += have
                have = 0
                at, held, have = _refill(data, at, held, have)
                if have == 0 or q > size:
                    return BAD
            zeros = lowest(held)
            q += zeros
            held = (held >> u64(zeros)) >> u64(1)
            have -= zeros + 1
            if have < k:
                at, held, have = _refill(data, at, held, have)
            if q > size or have < k:
                return BAD
            value = last + 1 + ((q << k) | i64(held & ((u64(1) << u64(k)) - u64(1))))
            held >>= u64(k)
            have -= k
            if value >= size:
                return BAD
            if flip:
                if value - last - 1 > end[c] - slot:
                    return BAD
                for member in range(last + 1, value):
                    ranks[slot] = member
                    slot += 1
            else:
                ranks[slot] = value
                slot += 1
            last = value
        if flip:
            for member in range(last + 1, size):
                ranks[slot] = member
                slot += 1
    return 8 * at - have


@register_jitable
def _nth(mask: Any, n: Any) -> Any:
    """Index of the set bit with ``n`` set bits below it, by halves and without a jump."""
    at = 0
    for half in (32, 16, 8, 4, 2, 1):
        below = ones((mask >> u64(at)) & ((u64(1) << u64(half)) - u64(1)))
        step = 1 if n >= below else 0
        n -= below * step
        at += half * step
    return at


@compiled
def select(
    cells: Array,
    how: Any,
    used: Array,
    ranks: Array,
    begin: Array,
    end: Array,
    sizes: Array,
    positions: Array,
    before: Array,
    out: Array,
) -> Any:
    """Inverse of ``rank``: the cells with these ranks, strictly increasing in each class.

    Writes their positions and words, and copies all cells to ``out`` on the way; BAD unless every class has just
    ``sizes`` members.
    """
    found = np.empty(BLOCK, np.uint8)
    below = np.empty(PARTS, np.int64)
    at, members = begin.copy(), np.zeros(begin.size, np.int64)
    following = np.full(begin.size, NEVER, np.int64)
    for u in range(used.size):
        following[used[u]] = ranks[begin[used[u]]]
    for start in range(0, cells.size, BLOCK):
        _classes(cells, start, how, found)
        _copy(cells, start, out)
        for u in range(used.size):
            c = used[u]
            lower = members[c]
            after = lower + _members(found, c)
            members[c] = after
            if following[c] < after:
                total = lower
                for i in range(PARTS):
                    below[i] = total
                    total += ones(equal(found, i * LANES, c))
            while following[c] < after:
                part = 0
                for i in range(1, PARTS):
                    part += 1 if following[c] >= below[i] else 0
                p = start + part * LANES + _nth(equal(found, part * LANES, c), following[c] - below[part])
                k = at[c]
                positions[k], before[k] = p, cells[p]
                at[c] = k + 1
                following[c] = i64(ranks[k + 1]) if k + 1 < end[c] else NEVER
    for u in range(used.size):
        c = used[u]
        if at[c] != end[c] or members[c] != sizes[c]:
            return BAD
    return OK


@compiled
def place(data: Array, bit: Any, symbols: Array, positions: Array, before: Array, out: Array) -> Any:
    """Write ``before`` plus the differences to ``out`` at ``positions``; low bits of those from 128 begin at ``bit``.

    Returns the next bit; BAD past the data, for a difference of zero, or for one that no cell can have.
    """
    bits = u64(8 * out.itemsize)
    largest = ~u64(0) >> (u64(64) - bits)
    for i in range(symbols.size):
        value = u64(symbols[i])
        if value == u64(0):
            return BAD
        if value >= u64(128):
            length = i64(value) - 121
            if length >= i64(bits) or bit + length > 8 * data.size:
                return BAD
            value = u64(1) << u64(length)
            for j in range(length):
                value |= u64((data[(bit + j) >> 3] >> ((bit + j) & 7)) & 1) << u64(j)
            bit += length
        delta = (value >> u64(1)) ^ (u64(0) - (value & u64(1)))
        out[positions[i]] = (u64(before[i]) + delta) & largest
    return bit
