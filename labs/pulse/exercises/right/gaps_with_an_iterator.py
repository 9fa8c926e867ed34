"""Right: reads through an iterator, and lets StopIteration tell that the data ended."""

import struct
from itertools import pairwise


def encode(positions):
    skips = (b - a - 1 for a, b in pairwise([-1, *positions]))
    return b"".join(bytes([s]) if s < 255 else b"\xff" + struct.pack("<Q", s - 255) for s in skips)


def decode(data, count, cells):
    if count < 0 or count > cells or count > len(data):
        raise ValueError("impossible count")
    stream, found, position = iter(data), [], -1
    try:
        while len(found) < count:
            skip = next(stream)
            if skip == 255:
                for i in range(8):
                    skip += next(stream) << (8 * i)
            position += 1 + skip
            if position >= cells:
                raise ValueError("outside of the tensor")
            found.append(position)
    except StopIteration:
        raise ValueError("too short") from None
    if next(stream, None) is not None:
        raise ValueError("too long")
    return found
