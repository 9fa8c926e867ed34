"""Wrong: a long skip is cut to one byte."""


def encode(positions):
    out, before = bytearray(), -1
    for position in positions:
        out.append((position - before - 1) % 256)
        before = position
    return bytes(out)


def decode(data, count, cells):
    if not 0 <= count <= cells or count != len(data):
        raise ValueError("count")
    positions, before = [], -1
    for skip in data:
        before += skip + 1
        if before >= cells:
            raise ValueError("position")
        positions.append(before)
    return positions
