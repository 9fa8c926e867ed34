"""Codes of 4, 5, 6 and 8 bits packed into bytes, block by block, and back.

A block of n codes is stored as planes: first the lower four bits, two codes a byte, the earlier code in the upper half
(the order of bitsandbytes); then, for 5 and 6 bits, the remaining one or two bits, eight or four codes a byte, the
earliest code in the lowest bits. A plane ends on a whole byte, so blocks of any length stay byte aligned, and whatever
reads 4-bit codes reads the first plane of the others too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a block of ``count`` codes of ``bits`` bits."""
    if bits == 8:
        return count
    high = bits - 4
    return -(-count // 2) + -(-count * high // 8)


def _padded(codes: Tensor, multiple: int) -> Tensor:
    """``codes`` (..., n) in groups: (..., ceil(n / multiple), multiple), zeros appended."""
    missing = -codes.shape[-1] % multiple
    padded: Tensor = F.pad(codes, (0, missing)).unflatten(-1, (-1, multiple))
    return padded


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (..., n), n >= 1 -> uint8 bytes (..., packed_bytes(n, bits))."""
    if bits == 8:
        return codes
    pairs = _padded(codes & 15, 2)
    low = (pairs[..., 0] << 4) | pairs[..., 1]
    high = bits - 4
    if high == 0:
        return low
    groups = _padded(codes >> 4, 8 // high)
    plane = groups[..., 0]
    for i in range(1, 8 // high):
        plane = plane | (groups[..., i] << (i * high))
    return torch.cat((low, plane), dim=-1)


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of :func:`pack`: uint8 bytes (..., packed_bytes(count, bits)) -> uint8 codes (..., count)."""
    if bits == 8:
        return packed
    low_bytes = -(-count // 2)
    low = packed[..., :low_bytes]
    codes = torch.stack((low >> 4, low & 15), dim=-1).flatten(-2)[..., :count]
    high = bits - 4
    if high == 0:
        return codes
    plane = packed[..., low_bytes:]
    mask = 2**high - 1
    parts = [(plane >> (i * high)) & mask for i in range(8 // high)]
    return codes | (torch.stack(parts, dim=-1).flatten(-2)[..., :count] << 4)
