"""Which 16-bit cells of two tensors differ in their bits, in order: a mask first, then the indices.

Bits, not values: a zero that changes its sign differs, a NaN that stays does not. The functions below with plain torch
operations are the definition and serve every device; on CUDA two Triton kernels give the same mask and the same
indices. Registered with ``torch.library``. :func:`dist_lib.pulse.encode` finds the changes of CUDA tensors so.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

TILE = 4096  # cells that are counted together


@lru_cache(maxsize=32)
def _able(index: int) -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)


def bit_changes_use_kernel(x: Tensor) -> bool:
    """Whether the changes of ``x`` are found by the Triton kernels: on a CUDA device of sm_80 or later."""
    return x.is_cuda and _able(x.get_device())


def _tiles(cells: int) -> int:
    return -(-cells // TILE)


@torch.library.custom_op("dist_lib::diff_bits", mutates_args=())
def diff_bits(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Mask and counts of int16 (cells,): int32 (128 words a tile; bit i of word w is cell 32 w + i), int32 (tiles,)."""
    cells, tiles = old.numel(), _tiles(old.numel())
    if cells and bit_changes_use_kernel(old):
        from dist_lib.kernels.bf16_diff import diff_launch

        mask, counts = old.new_empty(tiles * (TILE // 32), dtype=torch.int32), old.new_empty(tiles, dtype=torch.int32)
        with torch.cuda.device_of(old):
            diff_launch(old, new, mask, counts)
        return mask, counts
    differ = torch.zeros(tiles * TILE, dtype=torch.int64, device=old.device)
    differ[:cells] = old != new
    counts = differ.view(tiles, TILE).sum(1).to(torch.int32)
    bit = torch.arange(32, device=old.device)
    return (differ.view(-1, 32) << bit).sum(1).to(torch.int32), counts


@diff_bits.register_fake
def _(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    tiles = _tiles(old.numel())
    return old.new_empty(tiles * (TILE // 32), dtype=torch.int32), old.new_empty(tiles, dtype=torch.int32)


@torch.library.custom_op("dist_lib::compact_bits", mutates_args=())
def compact_bits(mask: Tensor, counts: Tensor, found: int) -> Tensor:
    """Indices of the set bits, int64 (found,), ascending; ``found`` is the sum of ``counts``."""
    if found and bit_changes_use_kernel(mask):
        from dist_lib.kernels.bf16_diff import compact_launch

        positions = mask.new_empty(found, dtype=torch.int64)
        with torch.cuda.device_of(mask):
            compact_launch(mask, counts.cumsum(0, dtype=torch.int64), positions)
        return positions
    bit = torch.arange(32, device=mask.device)
    return ((mask[:, None] >> bit) & 1).flatten().nonzero().flatten()


@compact_bits.register_fake
def _(mask: Tensor, counts: Tensor, found: int) -> Tensor:
    return mask.new_empty(found, dtype=torch.int64)


def bit_changes(old: Tensor, new: Tensor) -> Tensor:
    """Indices of the cells whose bits differ, ascending, in the order of C.

    Args:
        old, new: any shape, the same one; the same dtype of two bytes (bfloat16, float16, int16 ...) and device.

    Returns:
        int64 (changes,), on their device. Waits for the device once, to learn how many there are.

    Raises:
        TypeError: another dtype or two of them.
        ValueError: two shapes or two devices.
    """
    if old.dtype != new.dtype or old.dtype.itemsize != 2:
        raise TypeError(f"dtypes are {old.dtype} and {new.dtype}; both must be the same one of two bytes")
    if old.shape != new.shape or old.device != new.device:
        raise ValueError(
            f"shapes and devices must agree: {tuple(old.shape)} on {old.device}, {tuple(new.shape)} on {new.device}"
        )
    cells = (t.detach().contiguous().view(torch.int16).flatten() for t in (old, new))
    mask, counts = torch.ops.dist_lib.diff_bits(*cells)
    positions: Tensor = torch.ops.dist_lib.compact_bits(mask, counts, int(counts.sum(dtype=torch.int64)))
    return positions
