"""Bytes on the wire: numbers in their one canonical form, a reader that never runs past its end, bounded zstd.

Everything that comes from outside goes through :class:`Reader`: it raises
:class:`~dist_lib.pulse.errors.CorruptPatchError` for what is short, long, or written in another way than
:class:`Writer` would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dist_lib.pulse.errors import CorruptPatchError, MissingPackageError

ZSTD_LEVEL = 1
Words = np.ndarray[Any, Any]


class Writer:
    """Appends fields to a growing byte string."""

    def __init__(self) -> None:
        self._out = bytearray()

    def byte(self, value: int) -> None:
        """One byte."""
        self._out.append(value)

    def number(self, value: int) -> None:
        """A number of at least 0 as LEB128, shortest form."""
        self.numbers((value,))

    def numbers(self, values: Iterable[int]) -> None:
        """Numbers one after the other, each as :meth:`number` writes it."""
        out = self._out
        for value in values:
            while value >= 128:
                out.append((value & 127) | 128)
                value >>= 7
            out.append(value)

    def raw(self, data: bytes | memoryview | Words) -> None:
        """Bytes as they are; their length must be known to the reader."""
        self._out += data.tobytes() if isinstance(data, np.ndarray) else data

    def done(self) -> bytes:
        """Everything written so far."""
        return bytes(self._out)


class Reader:
    """Takes fields from a byte string in order; ``what`` names it in errors."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data, self._at, self.what = memoryview(data), 0, what

    def fail(self, why: str) -> CorruptPatchError:
        """The error to raise: where and why."""
        return CorruptPatchError(f"{self.what}, byte {self._at}: {why}")

    @property
    def left(self) -> int:
        """Bytes not yet taken."""
        return len(self._data) - self._at

    def byte(self, most: int = 255) -> int:
        """One byte of at most ``most``."""
        value = self.raw(1)[0]
        if value > most:
            raise self.fail(f"{value} where at most {most} is allowed")
        return value

    def number(self, most: int) -> int:
        """A LEB128 number of at most ``most``, in shortest form."""
        return self.numbers(1, most)[0]

    def numbers(self, count: int, most: int) -> list[int]:
        """``count`` numbers, each as :meth:`number` reads it."""
        if count > self.left:
            raise self.fail(f"{count} numbers expected, {self.left} bytes left")
        data, at, end, found = self._data, self._at, len(self._data), []
        for _ in range(count):
            value, shift, byte = 0, 0, 128
            while byte >= 128:
                if at >= end:
                    raise self.fail("it ends inside a number")
                byte = data[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if value > most or shift > 70:
                    raise self.fail(f"a number above {most}")
            if byte == 0 and shift > 7:
                raise self.fail("a number that is not in its shortest form")
            found.append(value)
        self._at = at
        return found

    def raw(self, length: int) -> memoryview:
        """The next ``length`` bytes, not copied."""
        if length > self.left:
            raise self.fail(f"{length} bytes expected, {self.left} left")
        self._at += length
        return self._data[self._at - length : self._at]

    def rest(self) -> memoryview:
        """All that is left."""
        return self.raw(self.left)

    def end(self) -> None:
        """Nothing may be left.

        Raises:
            CorruptPatchError: bytes are left over.
        """
        if self.left:
            raise self.fail(f"{self.left} bytes too many")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackageError("zstandard", "compressing a patch") from error
    return zstandard


def pack(data: bytes | Words) -> bytes:
    """One zstd frame that states its content's size, without a checksum: digests cover the result."""
    compressor = _zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False, write_content_size=True)
    content: Any = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
    packed: bytes = compressor.compress(content)
    return packed


def unpack(data: memoryview, size: int, what: str) -> Words:
    """Content of exactly one frame that states ``size`` bytes, writable 1-D uint8; no more is ever allocated.

    Raises:
        CorruptPatchError: not such a frame, another size, or bytes after it.
    """
    zstandard = _zstandard()
    try:
        found = zstandard.get_frame_parameters(bytes(data[:18]))
        if found.content_size != size or found.dict_id or found.window_size > max(size, 1 << 10):
            raise CorruptPatchError(f"{what}: a frame of {found.content_size} bytes where {size} are expected")
        content = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            data, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptPatchError(f"{what}: {error}") from error
    if len(content) != size:
        raise CorruptPatchError(f"{what}: {len(content)} bytes where {size} are expected")
    return np.frombuffer(bytearray(content), np.uint8)


def zigzag(old: Words, new: Words) -> Words:
    """Differences of words modulo 2^bits, folded so that small ones of either sign become small numbers."""
    bits = old.dtype.itemsize * 8
    delta = new - old
    one = old.dtype.type(1)
    folded: Words = (delta << one) ^ (old.dtype.type(0) - (delta >> old.dtype.type(bits - 1)))
    return folded


def unzigzag(old: Words, z: Words) -> Words:
    """The words whose :func:`zigzag` difference from ``old`` is ``z``."""
    one = old.dtype.type(1)
    words: Words = old + ((z >> one) ^ (old.dtype.type(0) - (z & one)))
    return words


def planes(words: Words) -> Words:
    """Bytes of words, all lowest bytes first, then all second ones, and so on: 1-D uint8."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.dtype.itemsize).T).reshape(-1)


def unplanes(data: Words, width: int) -> Words:
    """Inverse of :func:`planes` for words of ``width`` bytes."""
    return np.ascontiguousarray(data.reshape(width, -1).T).reshape(-1).view(np.dtype(f"u{width}"))
