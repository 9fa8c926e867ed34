"""Wrong: memory is taken for as many positions as the header claims."""

from collections.abc import Sequence


def encode(positions: Sequence[int]) -> bytes:
    out, before = bytearray(), -1
    for position in positions:
        skip, before = position - before - 1, position
        if skip < 255:
            out.append(skip)
        else:
            out.append(255)
            out += (skip - 255).to_bytes(8, "little")
    return bytes(out)


def decode(data: bytes, count: int, cells: int) -> list[int]:
    if not 0 <= count <= cells:
        raise ValueError(f"{count} positions for {cells} cells")
    positions, at, before = [0] * count, 0, -1
    for index in range(count):
        if at >= len(data):
            raise ValueError("the data end too early")
        skip, at = data[at], at + 1
        if skip == 255:
            if at + 8 > len(data):
                raise ValueError("the data end within a long skip")
            skip, at = 255 + int.from_bytes(data[at : at + 8], "little"), at + 8
        before += skip + 1
        if before >= cells:
            raise ValueError(f"position {before} of a tensor of {cells} cells")
        positions[index] = before
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after the last position")
    return positions
