"""The CPU hot loops, compiled by Numba on first use; import this module only where they run.

Plain functions over 1-D arrays: they hold no lock (``nogil``), allocate nothing and check every index that comes from
outside, for Numba does not. Compiled code is kept in Numba's cache, beside this file or, where that is read-only, in
the user's cache folder; where there is neither it is compiled anew in each process.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

logger = logging.getLogger(__name__)
Array = Any
i64: Any = np.int64
BLOCK = 64  # cells whose class members are counted together
OK, BAD = 0, -1


def _compile(function: Any) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep compiled code in
        logger.info("%s is compiled anew in each process", function.__name__)
        return njit(nogil=True)(function)


def _gap_pack(positions: Array, gaps: Array, escapes: Array) -> Any:
    """Gaps less one as bytes, 255 for an escape whose rest follows as LEB128; returns bytes of escapes."""
    used, last = 0, -1
    for i in range(positions.size):
        gap = i64(positions[i]) - last - 1
        last = i64(positions[i])
        if gap < 255:
            gaps[i] = gap
            continue
        gaps[i] = 255
        gap -= 255
        while gap >= 128:
            escapes[used] = (gap & 127) | 128
            gap >>= 7
            used += 1
        escapes[used] = gap
        used += 1
    return used


def _gap_unpack(gaps: Array, escapes: Array, size: Any, out: Array) -> Any:
    """Inverse of ``_gap_pack`` for positions below ``size``; BAD for anything that it would not have written."""
    used, last = 0, -1
    for i in range(gaps.size):
        gap = i64(gaps[i])
        if gap == 255:
            shift, byte = 0, 128
            while byte >= 128:
                if used >= escapes.size or shift > 28:
                    return BAD
                byte = i64(escapes[used])
                used += 1
                gap += (byte & 127) << shift
                shift += 7
            if byte == 0 and shift > 7:
                return BAD
        last += gap + 1
        if last >= size:
            return BAD
        out[i] = last
    return OK if used == escapes.size else BAD


@register_jitable
def _classify(part: Array, shift: Any, mask: Any, first: Any, classes: Any, out: Array) -> None:
    """Classes of up to 64 cells (their exponents, clamped to a range); the rest of the block is of class 127."""
    for i in range(part.size):  # over a slice that begins at 0: such loops become vector code
        out[i] = np.uint8(min(max((np.int32(part[i] >> shift) & mask) - first, 0), classes - 1))
    for i in range(part.size, BLOCK):
        out[i] = np.uint8(127)


@register_jitable
def _flags(word: Any, c: Any) -> Any:
    """Eight classes in a 64-bit word: 1 in each byte that is ``c``, else 0.

    With classes below 128, adding 127 to a byte sets its high bit just where it is not zero, and carries nothing.
    """
    different = word ^ (np.uint64(0x0101010101010101) * np.uint64(c))
    return (~(different + np.uint64(0x7F7F7F7F7F7F7F7F)) & np.uint64(0x8080808080808080)) >> np.uint64(7)


@register_jitable
def _members(words: Array, c: Any) -> Any:
    """How many of the 64 classes in eight words are ``c``."""
    flags = np.uint64(0)
    for i in range(words.size):
        flags += _flags(words[i], c)
    return i64((flags * np.uint64(0x0101010101010101)) >> np.uint64(56))


def _rank(
    cells: Array,
    shift: Any,
    mask: Any,
    first: Any,
    classes: Any,
    positions: Array,
    of: Array,
    ranks: Array,
    sizes: Array,
) -> None:
    """Class of each position (ascending) and its rank among all cells of that class; members of each class."""
    found = np.empty(BLOCK, np.uint8)
    words = found.view(np.uint64)
    k = 0
    for start in range(0, cells.size, BLOCK):
        _classify(cells[start : start + BLOCK], shift, mask, first, classes, found)
        while k < positions.size and positions[k] < start + BLOCK:
            inside = i64(positions[k]) - start
            c = found[inside]
            flags = np.uint64(0)
            for i in range(inside >> 3):
                flags += _flags(words[i], c)
            below = (np.uint64(1) << np.uint64(8 * (inside & 7))) - np.uint64(1)
            flags += _flags(words[inside >> 3], c) & below
            of[k] = c
            ranks[k] = sizes[c] + i64((flags * np.uint64(0x0101010101010101)) >> np.uint64(56))
            k += 1
        for c in range(classes):
            sizes[c] += _members(words, c)


def _select(
    cells: Array,
    shift: Any,
    mask: Any,
    first: Any,
    ranks: Array,
    begin: Array,
    end: Array,
    counts: Array,
    sizes: Array,
    out: Array,
) -> None:
    """Inverse of ``_rank``: positions of the cells with these ranks.

    Class ``c`` owns ``ranks[begin[c]:end[c]]``, strictly increasing, ``counts[c]`` of them; ``begin`` is advanced past
    each one that is found, so that it ends below ``end`` where a class has too few members. ``sizes`` counts members
    of classes with ranks.
    """
    found = np.empty(BLOCK, np.uint8)
    words = found.view(np.uint64)
    ones, high = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    for start in range(0, cells.size, BLOCK):
        _classify(cells[start : start + BLOCK], shift, mask, first, counts.size, found)
        for c in range(counts.size):
            if counts[c] == 0:
                continue
            k = begin[c]
            after = sizes[c] + _members(words, c)
            while k < end[c] and ranks[k] < after:
                wanted, word = i64(ranks[k]) - sizes[c], 0
                prefix = _flags(words[0], c) * ones  # byte b: members in bytes 0 to b
                while i64(prefix >> np.uint64(56)) <= wanted:
                    wanted -= i64(prefix >> np.uint64(56))
                    word += 1
                    prefix = _flags(words[word], c) * ones
                below = ((high | (ones * np.uint64(wanted))) - prefix) & high
                out[k] = start + 8 * word + i64(((below >> np.uint64(7)) * ones) >> np.uint64(56))
                k += 1
            begin[c] = k
            sizes[c] = after


def _complement(ranks: Array, size: Any, out: Array) -> None:
    """The numbers below ``size`` that are not in ``ranks`` (sorted)."""
    k, n = 0, 0
    for value in range(size):
        if k < ranks.size and ranks[k] == value:
            k += 1
        else:
            out[n] = value
            n += 1


@register_jitable
def _put(out: Array, bit: Any, value: Any, length: Any) -> Any:
    while length > 0:
        room = 8 - (bit & 7)
        take = min(room, length)
        out[bit >> 3] |= np.uint8((np.uint64(value) & np.uint64((1 << take) - 1)) << np.uint64(bit & 7))
        value = np.uint64(value) >> np.uint64(take)
        bit += take
        length -= take
    return bit


def _rice_pack(ranks: Array, k: Any, out: Array, bit: Any) -> Any:
    """Write the gaps of sorted ranks, quotient in unary (zeros, a one) and ``k`` low bits; returns the next bit."""
    last = -1
    for i in range(ranks.size):
        gap = i64(ranks[i]) - last - 1
        last = i64(ranks[i])
        bit += gap >> k
        out[bit >> 3] |= np.uint8(1 << (bit & 7))
        bit = _put(out, bit + 1, np.uint64(gap), k)
    return bit


def _rice_unpack(data: Array, bit: Any, k: Any, size: Any, out: Array) -> Any:
    """Inverse of ``_rice_pack`` for ranks below ``size``; the next bit, or BAD past the data or the class."""
    last, end = -1, data.size * 8
    for i in range(out.size):
        q = 0
        while True:
            if bit >= end:
                return BAD
            rest = data[bit >> 3] >> (bit & 7)
            if rest == 0:
                q += 8 - (bit & 7)
                bit += 8 - (bit & 7)
            else:
                while rest & 1 == 0:
                    rest >>= 1
                    q += 1
                    bit += 1
                bit += 1
                break
        if q > size or bit + k > end:
            return BAD
        low = 0
        got = 0
        while got < k:
            take = min(8 - (bit & 7), k - got)
            low |= ((i64(data[bit >> 3]) >> (bit & 7)) & ((1 << take) - 1)) << got
            got += take
            bit += take
        last += ((q << k) | low) + 1
        if last >= size:
            return BAD
        out[i] = last
    return bit


def _symbols(z: Array, symbols: Array) -> Any:
    """Symbol of each zigzagged difference: itself below 128, else 120 plus its bits; returns extra bits needed."""
    extra = 0
    for i in range(z.size):
        value = z[i]
        if value < 128:
            symbols[i] = np.uint8(value)
        else:
            length = 0
            while value > 0:
                value >>= np.uint64(1)
                length += 1
            symbols[i] = np.uint8(120 + length)
            extra += length - 1
    return extra


def _extra_pack(z: Array, symbols: Array, out: Array, bit: Any) -> Any:
    for i in range(z.size):
        if symbols[i] >= 128:
            bit = _put(out, bit, z[i], i64(symbols[i]) - 121)
    return bit


def _extra_unpack(data: Array, bit: Any, symbols: Array, largest: Any, z: Array) -> Any:
    """Inverse of ``_symbols`` and ``_extra_pack``; BAD past the data, for zero, or for more than ``largest``."""
    end = data.size * 8
    for i in range(symbols.size):
        symbol = i64(symbols[i])
        if symbol < 128:
            if symbol == 0:
                return BAD
            z[i] = symbol
            continue
        length = symbol - 121
        if length > 63 or bit + length > end:
            return BAD
        value = np.uint64(0)
        for j in range(length):
            one = np.uint64((data[bit >> 3] >> (bit & 7)) & 1)
            value |= one << np.uint64(j)
            bit += 1
        value |= np.uint64(1) << np.uint64(length)
        z[i] = value
    for i in range(z.size):
        if z[i] > largest:
            return BAD
    return bit


def _rans_pack(symbols: Array, groups: Array, freq: Array, start: Array, out: Array) -> Any:
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


def _rans_unpack(data: Array, groups: Array, freq: Array, start: Array, lookup: Array, symbols: Array) -> Any:
    """Inverse of ``_rans_pack``; BAD unless all words are used and the state ends where it began."""
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


gap_pack = _compile(_gap_pack)
gap_unpack = _compile(_gap_unpack)
rank = _compile(_rank)
select = _compile(_select)
complement = _compile(_complement)
rice_pack = _compile(_rice_pack)
rice_unpack = _compile(_rice_unpack)
symbols_of = _compile(_symbols)
extra_pack = _compile(_extra_pack)
extra_unpack = _compile(_extra_unpack)
rans_pack = _compile(_rans_pack)
rans_unpack = _compile(_rans_unpack)
