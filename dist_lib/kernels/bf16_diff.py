"""Triton kernels: which 16-bit cells of two tensors differ, as a bit mask, and the ordered list of their indices.

A program holds a tile of 4096 cells, which are 128 words of the mask. The first kernel reads both tensors, writes the
mask and the count of each tile. Where each tile's indices begin follows from the counts; the second kernel reads the
mask only and writes the indices in order. Nothing depends on which program runs first. Offsets are 64-bit.
"""

import torch
import triton
import triton.language as tl

TILE = 4096  # cells of a program: 32 a thread, so that each has eight 16-byte loads under way
WORDS: tl.constexpr = TILE // 32

OPTIONS = {"num_warps": 4}


@triton.jit
def diff_kernel(old_ptr, new_ptr, mask_ptr, counts_ptr, cells, EVEN: tl.constexpr, WORDS: tl.constexpr):
    """Mask words and count of one tile; EVEN: the tile lies in the tensors with all its cells."""
    program = tl.program_id(0).to(tl.int64)
    word = program * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)[None, :]
    cell = word[:, None] * 32 + bit
    if EVEN:
        old, new = tl.load(old_ptr + cell), tl.load(new_ptr + cell)
    else:
        inside = cell < cells
        old, new = tl.load(old_ptr + cell, mask=inside, other=0), tl.load(new_ptr + cell, mask=inside, other=0)
    differ = (old != new).to(tl.int32)
    tl.store(mask_ptr + word, tl.sum(differ << bit, axis=1))
    tl.store(counts_ptr + program, tl.sum(tl.sum(differ, axis=1), axis=0))


@triton.jit
def _ones(word):
    """Bits that are set in each 32-bit word."""
    word = word.to(tl.uint32)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def compact_kernel(mask_ptr, ends_ptr, positions_ptr, WORDS: tl.constexpr):
    """Indices of a tile's set bits, written in order up to where the tile's share ends."""
    program = tl.program_id(0).to(tl.int64)
    index = program * WORDS + tl.arange(0, WORDS)
    word = tl.load(mask_ptr + index)
    found = _ones(word)
    start = tl.load(ends_ptr + program) - tl.sum(found, axis=0)
    slot = start + (tl.cumsum(found, axis=0) - found)
    most = tl.max(found, axis=0)
    for _ in range(most):  # as often as the fullest word has bits: at one change in a hundred, four times
        lowest = word & -word
        tl.store(positions_ptr + slot, index * 32 + _ones(lowest - 1), mask=word != 0)
        slot += 1
        word = word & (word - 1)


def diff_launch(
    old: torch.Tensor, new: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor, *, interpreted: bool = False
) -> None:
    """Fill ``mask`` and ``counts``.

    Args:
        old, new: int16 (cells,), contiguous, not empty.
        mask: int32 (128 for each tile).
        counts: int32 (tiles,).
        interpreted: for tests: run on CPU tensors through Triton's interpreter.
    """
    kernel = _kernel(diff_kernel, interpreted)
    whole = old.numel() // TILE
    if whole:
        kernel[(whole,)](old, new, mask, counts, old.numel(), EVEN=True, WORDS=WORDS, **OPTIONS)
    if old.numel() % TILE:
        rest = slice(whole * TILE, None)
        words = mask[whole * WORDS :]
        last = old[rest], new[rest], words, counts[whole:]
        kernel[(1,)](*last, old.numel() - whole * TILE, EVEN=False, WORDS=WORDS, **OPTIONS)


def compact_launch(
    mask: torch.Tensor, ends: torch.Tensor, positions: torch.Tensor, *, interpreted: bool = False
) -> None:
    """Fill ``positions`` (int64, as many as there are bits) from ``mask`` and the running sum of its counts (int64)."""
    kernel = _kernel(compact_kernel, interpreted)
    kernel[(ends.numel(),)](mask, ends, positions, WORDS=WORDS, **OPTIONS)


def _kernel(kernel, interpreted: bool):
    if not interpreted:
        return kernel
    from dist_lib.kernels.interpreter import Interpreted

    return Interpreted(kernel)
