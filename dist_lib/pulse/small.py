"""The smallest codec: what the receiver knows already is not sent.

A cell changes the more likely, the smaller its old exponent is. Cells are grouped into classes by that exponent, the
ranks of changed cells inside each class are Rice coded with a parameter of the class (of unchanged ones where more
than half changed), and differences of bit patterns are coded by rANS with a frequency table for each group of
exponents, or one for all where that is shorter: a large weight only ever moves by one spacing, a small one by many.
The decoder derives classes, their sizes and groups from the base; every other degree of freedom is either written or
refused.

After the number of changes come, integers in LEB128 where no width is given:

=========== ===========================================================================================================
classes     first class, number of classes; of each its changed cells and, unless none, all its cells
parameters  of each class with changes the low bits of a Rice code, 1 byte
bits        number of bytes, then: of each such class the gaps of ranks (quotient as zeros and a one, low bits); then of
            each difference from 128 the bits below its highest one; lowest bit of a byte first
tables      1 byte: 0 the standard table, 1 one for each group, 2 one for all; unless 0, of each table the number of its
            symbols, their distances, and all frequencies but the last, less one; they sum to 4096
values      number of 16-bit words, then the words of the rANS stream, little-endian
=========== ===========================================================================================================

A symbol is a zigzagged difference itself below 128, else 120 plus its number of bits. A class is a pair of neighbouring
exponents, a group as many exponents as have 512 changed cells. Codec number 4; number 3, which had no table for all,
was never released.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dist_lib.pulse.codecs import Change, kernels
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
# Why a segment is refused, by the number that the compiled decoder returns.
REASONS = (
    "",
    "classes that do not add up, or are written in another way",
    "ranks that do not decode",
    "ranks outside their class",
    "tables of a kind that there is not",
    "a table that is not written so",
    "differences that do not decode",
    "differences, or what follows them, that nothing gives",
)


def _class_bits(dtype: torch.dtype) -> tuple[int, int]:
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    return (shift + 1, mask >> 1) if mask else (0, 0)


def _compiled() -> Any:
    kernels()  # says what is missing, if something is
    from dist_lib.pulse import _small_codec

    return _small_codec


@lru_cache(maxsize=1)
def _standard() -> Words:
    """The table for few changes, which has to be written nowhere: falls with the square of the distance; (1, 185)."""
    codec = _compiled()
    counts: Words = np.zeros((1, codec.SYMBOLS), np.int64)
    table = np.zeros_like(counts)
    distance = (np.arange(1, 128) + 1) // 2
    counts[0, 1:128] = 100_000 // (distance * distance)
    counts[0, 128:] = 1
    codec.normalise(counts, codec.SCALE, table)
    return table


def encode(out: Writer, old: Words, change: Change, dtype: torch.dtype) -> None:
    """Write one segment's changes.

    Args:
        out: what to append to; the number of changes is written already.
        old: words of the base, 1-D, contiguous.
        change: its changed cells.
        dtype: of the tensor.
    """
    exponent, cells = EXPONENTS.get(dtype, (0, 0)), (change.positions, change.before, change.after)
    out.raw(_compiled().encode(old, *cells, exponent, _class_bits(dtype), _standard()))


def decode(data: Reader, old: Words, count: int, dtype: torch.dtype, out: Words) -> None:
    """Inverse of :func:`encode`: write ``old`` with ``count`` changed words to ``out``.

    Raises:
        CorruptPatchError: bytes that :func:`encode` writes for no change of ``old``; some cells may have been written.
    """
    content = np.frombuffer(bytearray(data.rest()), np.uint8)
    exponent = EXPONENTS.get(dtype, (0, 0))
    code = _compiled().decode(content, old, count, exponent, _class_bits(dtype), _standard(), out)
    if code:
        raise data.fail(REASONS[-code])
