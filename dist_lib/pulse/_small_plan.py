"""Compiled loops of the ``small`` codec that settle what is coded how: classes, Rice parameters, groups, their header.

Everything here follows from counts. What is read is checked: a header that ``write_classes`` would not have written is
BAD. Numbers are LEB128 in shortest form, as everywhere in a patch.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from dist_lib.pulse._kernels import BAD, Array, compiled, i64


@compiled
def tally_exponents(cells: Array, shift: Any, mask: Any, counts: Array) -> None:
    """Count cells by ``(cell >> shift) & mask``."""
    for i in range(cells.size):
        counts[i64(cells[i] >> shift) & mask] += 1


@compiled
def choose_classes(by_exponent: Array, most: Any, counts: Array) -> Any:
    """First class and number of classes, and how many changed cells each has; a class is a pair of exponents.

    The rarest 1 % below are one class, all above the highest another.
    """
    total, last, seen, first = i64(0), 0, i64(0), 0
    for e in range(by_exponent.size):
        total += by_exponent[e]
        if by_exponent[e] > 0:
            last = e >> 1
    if by_exponent.size == 1:
        counts[0] = total
        return 0, 1
    for e in range(0, by_exponent.size, 2):
        seen += by_exponent[e] + by_exponent[e + 1]
        if seen > total // 100:
            first = e >> 1
            break
    first = max(first, last + 2 - most)
    for e in range(by_exponent.size):
        counts[min(max((e >> 1) - first, 0), last + 1 - first)] += by_exponent[e]
    return first, last + 2 - first


@register_jitable
def _parameter(members: Any, coded: Any) -> Any:
    """Low bits of a gap: the least k with a chance below 0.618 of another 2^k, for geometric gaps of this mean."""
    k = 0
    while (max(1, coded) << k) * 10000 < 4812 * members:
        k += 1
    return k


@compiled
def choose_parameters(counts: Array, sizes: Array, parameters: Array) -> Any:
    """The Rice parameter of each class that has any; returns the most bits that its ranks can need."""
    bits = i64(0)
    for c in range(counts.size):
        if counts[c] > 0:
            coded = min(counts[c], sizes[c] - counts[c])
            k = _parameter(sizes[c], coded)
            parameters[c] = k
            bits += (sizes[c] >> k) + coded * (k + 1)
    return bits


@register_jitable
def write_number(out: Array, at: Any, value: Any) -> Any:
    """Write a number as LEB128 at ``at``; returns what follows it."""
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@register_jitable
def read_number(data: Array, at: Any, most: Any) -> Any:
    """Inverse of ``write_number``: the number, or BAD above ``most``, and what follows it."""
    value, shift = i64(0), 0
    while True:
        if at >= data.size or shift > 56:
            return BAD, at
        byte = i64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return (BAD if value > most or (byte == 0 and shift > 0) else value), at
        shift += 7


@compiled
def write_classes(first: Any, counts: Array, sizes: Array, parameters: Array, nbytes: Any, out: Array) -> Any:
    """First class, number of classes, of each its changed cells and, if any, its cells; then the parameters of those
    that have any, a byte each, and how many bytes follow. Returns the bytes used, at most 20 and 11 a class."""
    at = write_number(out, 0, first)
    at = write_number(out, at, counts.size)
    for c in range(counts.size):
        at = write_number(out, at, counts[c])
        if counts[c] > 0:
            at = write_number(out, at, sizes[c])
    for c in range(counts.size):
        if counts[c] > 0:
            out[at] = parameters[c]
            at += 1
    return write_number(out, at, nbytes)


@compiled
def read_classes(
    data: Array, changed: Any, cells: Any, mask: Any, most: Any, counts: Array, sizes: Array, parameters: Array
) -> Any:
    """Inverse of ``write_classes`` into zeros: (bytes used or BAD, first, number of classes, bytes that follow)."""
    first, at = read_number(data, 0, mask)
    number, at = read_number(data, at, most)
    left, room = i64(changed), i64(cells)
    for c in range(max(number, 0)):
        counts[c], at = read_number(data, at, left)
        if counts[c] > 0:
            sizes[c], at = read_number(data, at, room)
        if counts[c] < 0 or sizes[c] < counts[c]:
            return BAD, 0, 0, 0
        left -= counts[c]
        room -= sizes[c]
    if first < 0 or number < 1 or left != 0:
        return BAD, 0, 0, 0
    for c in range(number):
        if counts[c] > 0:
            if at >= data.size or data[at] != _parameter(sizes[c], min(counts[c], sizes[c] - counts[c])):
                return BAD, 0, 0, 0
            parameters[c] = data[at]
            at += 1
    follow, at = read_number(data, at, i64(data.size))
    if follow < 0 or follow > data.size - at:
        return BAD, 0, 0, 0
    return at, first, number, follow


@compiled
def make_groups(counts: Array, least: Any, group_of: Array) -> Any:
    """Join neighbouring exponents until each group has ``least`` changed cells; returns the number of groups."""
    left = i64(0)
    for e in range(counts.size):
        left += counts[e]
    group, held = 0, i64(0)
    for e in range(counts.size):
        group_of[e] = group
        held += counts[e]
        left -= counts[e]
        if held >= least and left >= least and group < 255:
            group += 1
            held = i64(0)
    return group + 1


@compiled
def assign_groups(cells: Array, exponent: Any, group_of: Array, groups: Array) -> None:
    """The group of each cell by its exponent."""
    for i in range(cells.size):
        groups[i] = group_of[i64(cells[i] >> exponent[0]) & exponent[1]]
