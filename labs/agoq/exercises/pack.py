"""Exercise: store a tensor in 4 bits a number, block by block, two codes in a byte.

Fill in both functions, then run ``python -m labs check agoq pack``.
"""

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def encode(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Encode each token (row) by itself.

    A row is cut into blocks of ``block`` numbers, the last of which may be short; no block spans two rows. A block's
    scale is its largest magnitude. Each number, divided by the scale, becomes the index of the nearest entry of the
    codebook. Two indices share a byte: the first of each pair in the upper four bits; where a row has an odd number of
    numbers the lower four bits of its last byte are 0. Zeros must come back as zeros, a NaN as a NaN.

    Args:
        x: (tokens, width) float32.
        codebook: (16,) float32, ascending, from -1 to 1; contains 0.
        block: an even number, at least 2.

    Returns:
        Bytes (tokens, ceil(width / 2)) uint8, and scales (tokens, ceil(width / block)) float32.
    """
    raise NotSolvedYet("where does a block end, and what does a block of zeros divide by?")


def decode(packed: Tensor, scales: Tensor, codebook: Tensor, block: int, width: int) -> Tensor:
    """Take bytes and scales apart again.

    Returns:
        (tokens, width) float32.
    """
    raise NotSolvedYet("which half of a byte comes first?")
