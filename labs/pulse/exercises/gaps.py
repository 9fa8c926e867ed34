"""Exercise: positions as gaps of one byte, and a decoder that believes nothing.

Fill in both functions, then run ``python -m labs check pulse gaps``.
"""

from collections.abc import Sequence

from dist_lib.checks import NotSolvedYet


def encode(positions: Sequence[int]) -> bytes:
    """Code ascending positions.

    Each position is stored as the number of cells that it skips: position minus the one before minus 1, and for the
    first just the position. A skip below 255 is one byte. Any other is the byte 255 and then the skip minus 255, as
    eight bytes, least significant first.

    Args:
        positions: from 0 on, strictly ascending; may be empty, and may lie beyond 2^32.
    """
    raise NotSolvedYet("what is stored for the positions 0, 1, 2?")


def decode(data: bytes, count: int, cells: int) -> list[int]:
    """The positions again, from data that may be damaged or hostile.

    Args:
        data: what should be the output of :func:`encode`.
        count: of positions, as the patch's header claims.
        cells: of the tensor; every position must be below it.

    Raises:
        ValueError: ``count`` below 0 or above ``cells``; the data end too early, or go on after the last position; a
            position is not below ``cells``. A false ``count`` of 10^15 must fail at once, without taking memory for it.
    """
    raise NotSolvedYet("what is the smallest number of bytes that count positions can have?")
