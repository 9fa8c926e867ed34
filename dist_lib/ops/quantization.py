"""Block quantisation: tensors held in 4 to 8 bits a number, one scale a block, for storage and for the wire.

>>> q = quantize(x, codec="fp4", block_size=128)
>>> q.nbytes, q.dequantize()
>>> accumulate_(main_gradient, gradient)      # 8-bit formats: decode, add in float32, encode, in one pass

Blocks run along the last dimension and never span two rows: a token's numbers do not depend on its neighbours. With
``flat=True`` the tensor counts as one long row, as suits gradients. A last block that is short is stored short; nothing
is padded. Nothing is computed in few bits here: numbers are encoded, kept or sent, and decoded.

Registered with ``torch.library``; :mod:`dist_lib.ops.block_codes` is the definition and serves every device; on CUDA
Triton kernels reproduce it. AGoQ (arXiv 2605.00539) stores activations (``fp4``, blocks of 128) and gradients so.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dist_lib.ops.block_codes import decode, encode
from dist_lib.ops.codecs import BLOCK_SIZES, CODECS, SCALE_DTYPES, get_codec, tables
from dist_lib.ops.noise import seed_from, uniform
from dist_lib.ops.packing import packed_bytes

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NEAREST = -1  # the seed that stands for nearest rounding in the registered operations
TILE = 2**18  # numbers that a CPU works on at a time, so that what lies between two steps stays in its cache


@dataclass(frozen=True)
class Quantized:
    """A tensor in blocks of codes.

    Attributes:
        codes: uint8; ``(*leading, bytes of a row)``, or (bytes,) if ``flat``.
        scales: float32, float16; ``(*leading, blocks of a row)``, or (blocks,) if ``flat``; ``int4_minmax`` has a last
            dimension of 2: step and smallest value. NaN marks a block that held a NaN or an infinity.
        shape: of the tensor that it stands for.
        dtype: of that tensor.
        codec: name of the format, a key of ``CODECS``.
        block_size: numbers that share a scale.
        flat: whether the tensor counts as one row.
    """

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype
    codec: str
    block_size: int
    flat: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in its own dtype or in another floating one."""
        return dequantize(self, dtype)


def _rows(shape: torch.Size, flat: bool) -> tuple[int, int]:
    """(rows, numbers in a row)."""
    if flat or len(shape) == 0:
        return 1, math.prod(shape)
    return math.prod(shape[:-1]), shape[-1]


def row_bytes(count: int, block_size: int, bits: int) -> int:
    """Bytes of the codes of a row of ``count`` numbers."""
    full, rest = divmod(count, block_size)
    return full * packed_bytes(block_size, bits) + packed_bytes(rest, bits)


def quantized_nbytes(
    shape: tuple[int, ...],
    codec: str = "fp4",
    block_size: int = 128,
    scale_dtype: torch.dtype = torch.float32,
    *,
    flat: bool = False,
) -> int:
    """Bytes that :func:`quantize` needs for a tensor of this shape: rows x (packed codes + scales)."""
    check_choice(codec, block_size, scale_dtype)
    rows, count = _rows(torch.Size(shape), flat)
    chosen = get_codec(codec)
    scales = -(-count // block_size) * chosen.scales_per_block * scale_dtype.itemsize
    return rows * (row_bytes(count, block_size, chosen.bits) + scales)


def check_choice(codec: str, block_size: int, scale_dtype: torch.dtype) -> None:
    """Raise a ValueError or TypeError that says what is allowed, if one of these is not."""
    get_codec(codec)
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}; choose one of {BLOCK_SIZES}")
    if scale_dtype not in SCALE_DTYPES:
        raise TypeError(f"scale_dtype is {scale_dtype}; choose torch.float32 or torch.float16")


def _check_tensor(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"x has dtype {x.dtype}; quantisation takes float32, float16, bfloat16 or float64")


# ---- the registered operations, on (rows, numbers) ----------------------------------------------------------------


@lru_cache(maxsize=32)
def _able(index: int) -> bool:
    """Whether Triton is there and this GPU is of the generation that the kernels are compiled for (sm_80 and later)."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)


def quantize_uses_kernel(x: Tensor) -> bool:
    """Whether ``x`` is encoded and decoded by the Triton kernels: on a CUDA device that can, and not in float64."""
    return x.is_cuda and x.dtype != torch.float64 and _able(x.get_device())


def _spans(count: int, block_size: int) -> list[tuple[slice, int, int]]:
    """The whole blocks of a row and its short last block: (numbers, blocks, numbers in each block)."""
    full, rest = divmod(count, block_size)
    spans = [(slice(0, full * block_size), full, block_size)] if full else []
    return [*spans, (slice(full * block_size, count), 1, rest)] if rest else spans


def _tiles(numbers: Tensor) -> Iterator[tuple[slice, slice]]:
    """Pieces of (rows, blocks, numbers of a block): whole rows or blocks of one row, about :data:`TILE` on a CPU."""
    rows, blocks, size = numbers.shape
    if numbers.device.type != "cpu":
        yield slice(None), slice(None)
        return
    some_rows, some_blocks = max(TILE // (blocks * size), 1), max(TILE // size, 1)
    for row in range(0, rows, some_rows):
        for block in range(0, blocks, some_blocks):
            yield slice(row, row + some_rows), slice(block, block + some_blocks)


@torch.library.custom_op("dist_lib::quantize_blocks", mutates_args=())
def quantize_blocks(x: Tensor, codec: str, block_size: int, half_scales: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes (rows, bytes) uint8 and scales (rows, blocks[, 2]) of ``x`` (rows, numbers); seed -1: nearest rounding."""
    chosen = CODECS[codec]
    scale_dtype = torch.float16 if half_scales else torch.float32
    rows, count = x.shape
    codes, scales = empty_codes(x, codec, block_size, scale_dtype)
    if x.numel() == 0:
        return codes, scales
    if quantize_uses_kernel(x):
        from dist_lib.kernels.quantize import quantize_launch

        with torch.cuda.device_of(x):
            quantize_launch(x, codes, scales, chosen, tables(codec, x.device), block_size, seed)
        return codes, scales
    noise = None if seed == NEAREST else uniform(seed, 0, x.numel(), x.device).view(rows, count)
    at_byte = at_block = 0
    for span, blocks, size in _spans(count, block_size):
        width = packed_bytes(size, chosen.bits)
        numbers = x[:, span].unflatten(-1, (blocks, size))
        some = None if noise is None else noise[:, span].unflatten(-1, (blocks, size))
        packed = codes[:, at_byte : at_byte + blocks * width].unflatten(-1, (blocks, width))
        scale = scales[:, at_block : at_block + blocks]
        for tile in _tiles(numbers):
            wide = numbers[tile].to(torch.float32, memory_format=torch.contiguous_format)
            packed[tile], scale[tile] = encode(wide, chosen, scale_dtype, None if some is None else some[tile])
        at_byte, at_block = at_byte + blocks * width, at_block + blocks
    return codes, scales


def empty_codes(x: Tensor, codec: str, block_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the codes (rows, bytes) and scales (rows, blocks[, 2]) of ``x`` (rows, numbers)."""
    chosen = CODECS[codec]
    rows, count = x.shape
    codes = x.new_empty((rows, row_bytes(count, block_size, chosen.bits)), dtype=torch.uint8)
    pair = (2,) if chosen.scales_per_block == 2 else ()
    return codes, x.new_empty((rows, -(-count // block_size), *pair), dtype=scale_dtype)


@quantize_blocks.register_fake
def _(x: Tensor, codec: str, block_size: int, half_scales: bool, seed: int) -> tuple[Tensor, Tensor]:
    return empty_codes(x, codec, block_size, torch.float16 if half_scales else torch.float32)


@torch.library.custom_op("dist_lib::dequantize_blocks", mutates_args=())
def dequantize_blocks(
    codes: Tensor, scales: Tensor, count: int, codec: str, block_size: int, dtype: torch.dtype
) -> Tensor:
    """The numbers (rows, count) in ``dtype`` of what :func:`quantize_blocks` returned."""
    out = codes.new_empty((codes.shape[0], count), dtype=dtype)
    if out.numel() == 0:
        return out
    chosen = CODECS[codec]
    if quantize_uses_kernel(out):
        from dist_lib.kernels.quantize import dequantize_launch

        with torch.cuda.device_of(codes):
            dequantize_launch(codes, scales, out, chosen, tables(codec, codes.device), block_size)
        return out
    at_byte = at_block = 0
    for span, blocks, size in _spans(count, block_size):
        width = packed_bytes(size, chosen.bits)
        packed = codes[:, at_byte : at_byte + blocks * width].unflatten(-1, (blocks, width))
        scale = scales[:, at_block : at_block + blocks]
        numbers = out[:, span].unflatten(-1, (blocks, size))
        for tile in _tiles(numbers):
            room = numbers[tile] if dtype == torch.float32 else None  # one pass over memory less
            found = decode(packed[tile], scale[tile], size, chosen, room)
            if room is None:
                numbers[tile] = found
        at_byte, at_block = at_byte + blocks * width, at_block + blocks
    return out


@dequantize_blocks.register_fake
def _(codes: Tensor, scales: Tensor, count: int, codec: str, block_size: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], count), dtype=dtype)


@torch.library.custom_op("dist_lib::accumulate_blocks", mutates_args=("codes", "scales"))
def accumulate_blocks(codes: Tensor, scales: Tensor, x: Tensor, codec: str, block_size: int, seed: int) -> None:
    """Add ``x`` (rows, numbers) to the numbers that ``codes`` and ``scales`` stand for; added in float32."""
    if x.numel() == 0:
        return
    if quantize_uses_kernel(x):
        from dist_lib.kernels.quantize import quantize_launch

        table = tables(codec, x.device)
        with torch.cuda.device_of(x):
            quantize_launch(x, codes, scales, CODECS[codec], table, block_size, seed, accumulate=True)
        return
    total = torch.ops.dist_lib.dequantize_blocks(codes, scales, x.shape[1], codec, block_size, torch.float32)
    total += x
    half = scales.dtype == torch.float16
    new_codes, new_scales = torch.ops.dist_lib.quantize_blocks(total, codec, block_size, half, seed)
    codes.copy_(new_codes)
    scales.copy_(new_scales)


# ---- for users ----------------------------------------------------------------------------------------------------


def rounding_seed(rounding: str, generator: torch.Generator | int | None) -> int:
    """The seed that the registered operations take: of stochastic rounding, or :data:`NEAREST`."""
    if rounding == "nearest":
        return NEAREST
    if rounding == "stochastic":
        return seed_from(generator)
    raise ValueError(f"rounding is {rounding!r}; choose 'nearest' or 'stochastic'")


def quantize(
    x: Tensor,
    codec: str = "fp4",
    block_size: int = 128,
    scale_dtype: torch.dtype = torch.float32,
    rounding: str = "nearest",
    generator: torch.Generator | int | None = None,
    *,
    flat: bool = False,
) -> Quantized:
    """Encode a tensor in blocks.

    In a block with largest magnitude ``a`` a number moves by at most ``half_gap * a`` (twice that if rounded
    stochastically), and float32 rounds the result; with float16 scales by ``2^-11 a`` more, and ``a`` counts as at
    least 2^-14. Blocks with ``a`` below 1e-33 may come back as zeros.

    Args:
        x: any shape, strides and number of elements; float32, float16, bfloat16 or float64 (computed in float32).
        codec: a key of ``CODECS``.
        block_size: numbers that share a scale: 32, 64, 128 or 256.
        scale_dtype: float32 or float16 (half the bytes; magnitudes from 2^-14 to 65504).
        rounding: ``"nearest"``, or ``"stochastic"``: to one of the two neighbours, right on average.
        generator: for stochastic rounding: a generator, or a seed (int). The same seed rounds the same on all devices.
        flat: blocks over the whole tensor in its order, instead of along the last dimension.

    Returns:
        Codes, scales and what is needed to decode them; never part of an autograd graph.

    Raises:
        ValueError: unknown codec, block size or rounding; no generator for stochastic rounding; on a CPU, a finite
            block whose scale float16 cannot hold (on a GPU, where looking would stall, that block decodes to NaN).
        TypeError: a dtype that is not allowed.
    """
    check_choice(codec, block_size, scale_dtype)
    _check_tensor(x)
    seed = rounding_seed(rounding, generator)
    rows = _rows(x.shape, flat)
    half = scale_dtype == torch.float16
    codes, scales = torch.ops.dist_lib.quantize_blocks(x.detach().reshape(rows), codec, block_size, half, seed)
    if half and not x.is_cuda and not torch.compiler.is_compiling() and scales.isnan().any() and x.isfinite().all():
        raise ValueError(
            "a block's scale is beyond float16 (65504): use scale_dtype=torch.float32, or scale the tensor down"
        )
    leading = () if flat else x.shape[:-1]
    codes, scales = codes.reshape(*leading, codes.shape[1]), scales.reshape(*leading, *scales.shape[1:])
    return Quantized(codes, scales, x.shape, x.dtype, codec, block_size, flat)


def as_rows(q: Quantized) -> tuple[Tensor, Tensor, int]:
    """Codes and scales as (rows, ...), views of those of ``q``; and the numbers in a row."""
    rows, count = _rows(q.shape, q.flat)
    chosen = get_codec(q.codec)
    width, blocks = row_bytes(count, q.block_size, chosen.bits), -(-count // q.block_size)
    pair = (2,) if chosen.scales_per_block == 2 else ()
    if q.codes.numel() != rows * width or q.scales.numel() != math.prod((rows, blocks, *pair)):
        raise ValueError(
            f"{tuple(q.codes.shape)} codes and {tuple(q.scales.shape)} scales do not belong to a tensor of shape "
            f"{tuple(q.shape)} in {q.codec}, blocks of {q.block_size}"
        )
    return q.codes.view(rows, width), q.scales.view(rows, blocks, *pair), count


def dequantize(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """Decode: a contiguous tensor of the original shape, in its dtype or in ``dtype`` (floating).

    Raises:
        TypeError: a dtype that is not float32, float16, bfloat16 or float64.
        ValueError: codes or scales whose size does not fit the shape.
    """
    dtype = q.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        raise TypeError(f"dtype is {dtype}; decoding gives float32, float16, bfloat16 or float64")
    codes, scales, count = as_rows(q)
    out: Tensor = torch.ops.dist_lib.dequantize_blocks(codes, scales, count, q.codec, q.block_size, dtype)
    return out.reshape(q.shape)


def accumulate_(
    q: Quantized, x: Tensor, rounding: str = "nearest", generator: torch.Generator | int | None = None
) -> Quantized:
    """Add ``x`` to ``q`` in place: decode, add in float32, encode; one pass over memory on a GPU. Returns ``q``.

    Every call rounds afresh, so that the error of a sum of M terms grows as about the square root of M.

    Args:
        q: in an 8-bit format, contiguous codes and scales (as made by :func:`quantize` or :func:`quantized_zeros`).
        x: of the same shape; any dtype that :func:`quantize` takes.
        rounding, generator: as for :func:`quantize`.

    Raises:
        ValueError: a format of fewer bits, or another shape.
        TypeError: a dtype that is not allowed.
    """
    if get_codec(q.codec).bits != 8:
        eights = ", ".join(name for name, codec in CODECS.items() if codec.bits == 8)
        raise ValueError(f"codec is {q.codec!r}; only 8-bit formats accumulate: {eights}")
    if x.shape != q.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, the sum has {tuple(q.shape)}")
    _check_tensor(x)
    codes, scales, count = as_rows(q)
    rows = x.detach().reshape(codes.shape[0], count)
    torch.ops.dist_lib.accumulate_blocks(codes, scales, rows, q.codec, q.block_size, rounding_seed(rounding, generator))
    return q


def quantized_zeros(
    shape: tuple[int, ...],
    codec: str = "int8",
    block_size: int = 256,
    scale_dtype: torch.dtype = torch.float32,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    flat: bool = True,
) -> Quantized:
    """Zeros in blocks: where an 8-bit sum starts. Scales of 0 are what makes it zero, whatever the codes.

    Raises:
        ValueError, TypeError: as :func:`quantize`.
    """
    check_choice(codec, block_size, scale_dtype)
    chosen = get_codec(codec)
    size = torch.Size(shape)
    count = _rows(size, flat)[1]
    leading = () if flat else size[:-1]
    pair = (2,) if chosen.scales_per_block == 2 else ()
    codes = torch.zeros(*leading, row_bytes(count, block_size, chosen.bits), dtype=torch.uint8, device=device)
    scales = torch.zeros(*leading, -(-count // block_size), *pair, dtype=scale_dtype, device=device)
    return Quantized(codes, scales, size, dtype, codec, block_size, flat)
