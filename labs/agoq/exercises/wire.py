"""Exercise: count the bytes of a sum over ranks that travels in 8 bits.

Fill in the function, then run ``python -m labs check agoq wire``.
"""

from dist_lib.checks import NotSolvedYet


def sent(numel: int, ranks: int, block: int) -> int:
    """Bytes that leave one rank in one 8-bit all-reduce of ``numel`` numbers.

    The gradient is filled up with zeros and cut into ``ranks`` shards of equal length. Each shard travels as one
    message: a float32 scale for each block of ``block`` numbers (the last block of a shard may be short), then one byte
    a number, then zero bytes until the message is a multiple of 4 bytes.

    1. All-to-all: each rank sends shard j to rank j, which decodes what it receives and adds it in float32.
    2. All-gather: each rank encodes its sum and sends it to every other rank.

    A rank sends nothing to itself. With one rank, or no numbers, nothing is sent.

    Args:
        numel: numbers in the gradient, 0 or more.
        ranks: 1 or more.
        block: numbers that share a scale, 1 or more.

    Returns:
        Bytes, a whole number.
    """
    raise NotSolvedYet("how long is a message, and how many of them does a rank send in each of the two steps?")
