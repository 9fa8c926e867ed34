"""The patch file, version 1: its layout, its limits, and a decoder that trusts nothing.

All integers are LEB128 in shortest form unless a width is given; those with a width are little-endian.

======================  ==========================================================================================
field                   content
======================  ==========================================================================================
magic                   8 bytes ``DLPULSE1``
sizes                   header length (4 bytes), body length (8 bytes)
seal                    SHA-256 over sizes, header and body
header                  see below
body                    segments of all tensors, one after the other, in order
======================  ==========================================================================================

The header holds: codec (1 byte); whether there is a base (1 byte, 0 or 1); the base's version and its 32-byte digest
if there is; version and 32-byte digest of the result; the number of tensors; then one entry for each tensor in order
of name. An entry is: length of the prefix shared with the previous name, length of the rest, the rest in UTF-8; kind
(1 byte); for kind *alias* the index of the tensor it shares storage with; otherwise dtype (1 byte), number of
dimensions and dimensions, 32-byte digest of the result, and for kinds *cells* and *full* the length of each segment of
2^22 cells. Kind *same* has no segments: the tensor is the base's. Tensors of the base that no entry names are gone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dist_lib.pulse.codecs import CODECS, SEGMENT
from dist_lib.pulse.errors import CorruptPatchError, LimitError
from dist_lib.pulse.state import CODES, DTYPES, State, TensorSpec, whole_digest
from dist_lib.pulse.wire import Reader, Writer

MAGIC = b"DLPULSE1"
FIXED = 8 + 4 + 8 + 32
KINDS = ("same", "alias", "cells", "full")


@dataclass(frozen=True)
class Limits:
    """What a receiver grants to a patch before it allocates anything.

    Attributes:
        header_bytes: of the header.
        tensors: number of entries.
        name_bytes, dimensions: of one tensor.
        state_bytes: of the whole result.
    """

    header_bytes: int = 1 << 26
    tensors: int = 1 << 20
    name_bytes: int = 1 << 12
    dimensions: int = 64
    state_bytes: int = 1 << 40


@dataclass(frozen=True)
class Entry:
    """One tensor of the result.

    Attributes:
        name, spec: of the tensor.
        kind: ``"same"``, ``"alias"``, ``"cells"`` or ``"full"``.
        digest: SHA-256 of the result's tensor.
        alias: the name whose storage this one shares, for kind ``"alias"``.
        segments: encoded segments in order, empty ones for no change; for kinds ``"cells"`` and ``"full"``.
    """

    name: str
    spec: TensorSpec
    kind: str
    digest: bytes
    alias: str | None = None
    segments: tuple[memoryview, ...] = ()

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(len(s) for s in self.segments)


@dataclass(frozen=True)
class Patch:
    """A change from one version of a state to another: read from a file, or about to be written to one.

    Attributes:
        version: of the result.
        base_version, base_digest: what it applies to; both None for an anchor, which needs no base.
        digest: of the whole result.
        codec: name of the codec of its changes; None before it is encoded.
        entries: all tensors of the result in order of name.
        source: the states that it was made from, before it is encoded.
    """

    version: int
    base_version: int | None
    base_digest: bytes | None
    digest: bytes
    codec: str | None
    entries: tuple[Entry, ...] = field(repr=False)
    source: tuple[State, State] | None = field(default=None, repr=False, compare=False)

    @property
    def is_anchor(self) -> bool:
        """Whether it is a whole state."""
        return self.base_digest is None

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Specs of the result's tensors."""
        return {e.name: e.spec for e in self.entries}

    @property
    def tensor_digests(self) -> Mapping[str, bytes]:
        """Digests of the result's tensors."""
        return {e.name: e.digest for e in self.entries}


def segment_cells(spec: TensorSpec) -> Sequence[tuple[int, int]]:
    """First cell and number of cells of each segment of a tensor."""
    return [(start, min(SEGMENT, spec.cells - start)) for start in range(0, spec.cells, SEGMENT)]


def _write_entry(out: Writer, entry: Entry, previous: bytes, index: Mapping[str, int]) -> bytes:
    name = entry.name.encode()
    shared = 0
    while shared < min(len(name), len(previous)) and name[shared] == previous[shared]:
        shared += 1
    out.number(shared)
    out.number(len(name) - shared)
    out.raw(name[shared:])
    out.byte(KINDS.index(entry.kind))
    if entry.alias is not None:
        out.number(index[entry.alias])
        return name
    out.byte(CODES[entry.spec.dtype])
    out.number(len(entry.spec.shape))
    for size in entry.spec.shape:
        out.number(size)
    out.raw(entry.digest)
    for segment in entry.segments:
        out.number(len(segment))
    return name


def write(patch: Patch) -> bytes:
    """The file of an encoded patch; the same patch gives the same bytes.

    Raises:
        ValueError: the patch has no codec yet.
    """
    if patch.codec is None:
        raise ValueError("the patch is not encoded yet; encode() does both")
    out = Writer()
    out.byte(CODECS[patch.codec].number)
    out.byte(int(not patch.is_anchor))
    if patch.base_digest is not None and patch.base_version is not None:
        out.number(patch.base_version)
        out.raw(patch.base_digest)
    out.number(patch.version)
    out.raw(patch.digest)
    out.number(len(patch.entries))
    previous, index = b"", {e.name: i for i, e in enumerate(patch.entries)}
    for entry in patch.entries:
        previous = _write_entry(out, entry, previous, index)
    header = out.done()
    body = b"".join(segment for entry in patch.entries for segment in entry.segments)
    sizes = len(header).to_bytes(4, "little") + len(body).to_bytes(8, "little")
    return b"".join((MAGIC, sizes, hashlib.sha256(sizes + header + body).digest(), header, body))


def _read_name(data: Reader, previous: bytes, limits: Limits) -> bytes:
    shared = data.number(len(previous))
    rest = bytes(data.raw(data.number(limits.name_bytes)))
    name = previous[:shared] + rest
    if len(name) > limits.name_bytes:
        raise LimitError(f"{data.what}: a name of {len(name)} bytes; granted are {limits.name_bytes}")
    if name <= previous or (shared < min(len(name), len(previous)) and name[shared] == previous[shared]):
        raise data.fail("names out of order, or not in their shortest form")
    return name


def _read_spec(data: Reader, limits: Limits) -> TensorSpec:
    code = data.byte()
    if code not in DTYPES:
        raise data.fail(f"dtype {code} is unknown here")
    shape = tuple(data.number(limits.state_bytes) for _ in range(data.number(limits.dimensions)))
    spec = TensorSpec(DTYPES[code], shape)
    extent = math.prod(max(1, size) for size in shape) * spec.dtype.itemsize  # strides of an empty tensor count too
    if extent > limits.state_bytes:
        raise LimitError(f"{data.what}: a tensor of {extent} bytes; granted are {limits.state_bytes}")
    return spec


def _read_entries(data: Reader, body: memoryview, based: bool, limits: Limits) -> tuple[Entry, ...]:
    count = data.number(limits.tensors)
    entries: list[Entry] = []
    previous, used, at = b"", 0, 0
    for _ in range(count):
        raw = previous = _read_name(data, previous, limits)
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise data.fail("a name that is not UTF-8") from error
        if not name.isprintable():
            raise data.fail("a name that is not printable")
        kind = KINDS[data.byte(3)]
        if kind == "alias":
            owner = entries[data.number(len(entries) - 1)] if entries else None
            if owner is None or owner.kind == "alias":
                raise data.fail("an alias of nothing")
            entries.append(Entry(name, owner.spec, kind, owner.digest, owner.name))
            continue
        spec = _read_spec(data, limits)
        digest = bytes(data.raw(32))
        used += spec.nbytes
        if used > limits.state_bytes:
            raise LimitError(f"{data.what}: a state above the {limits.state_bytes} bytes that are granted")
        segments: list[memoryview] = []
        if kind == "full" or (kind == "cells" and based):
            for _ in range(0, spec.cells, SEGMENT):
                length = data.number(len(body) - at)
                segments.append(body[at : at + length])
                at += length
        elif not based:
            raise data.fail(f"{kind!r} in a patch without a base")
        if (kind == "full" and not all(len(s) for s in segments)) or (kind == "cells" and not any(map(len, segments))):
            raise data.fail(f"{kind!r} without content")
        entries.append(Entry(name, spec, kind, digest, None, tuple(segments)))
    data.end()
    if at != len(body):
        raise data.fail(f"{len(body) - at} bytes of the body belong to no tensor")
    return tuple(entries)


def read(data: bytes | memoryview, limits: Limits | None = None) -> Patch:
    """Read a patch file; nothing is decompressed or allocated in proportion to what it claims.

    Args:
        data: the whole file; the patch's segments stay views of it.
        limits: what is granted; None for the defaults.

    Raises:
        CorruptPatchError: any deviation from the format, or from the seal.
        LimitError: more is claimed than is granted.
    """
    limits = limits or Limits()
    view = memoryview(data)
    if len(view) < FIXED or view[:8] != MAGIC:
        raise CorruptPatchError(f"not a patch of version 1: {len(view)} bytes that begin with {bytes(view[:8])!r}")
    header_length, body_length = int.from_bytes(view[8:12], "little"), int.from_bytes(view[12:20], "little")
    if header_length > limits.header_bytes:
        raise LimitError(f"a header of {header_length} bytes; granted are {limits.header_bytes}")
    if FIXED + header_length + body_length != len(view):
        raise CorruptPatchError(f"{FIXED + header_length + body_length} bytes announced, {len(view)} there")
    seal = hashlib.sha256(view[8:20])
    seal.update(view[FIXED:])
    if seal.digest() != view[20:FIXED]:
        raise CorruptPatchError("the patch is damaged: its seal is of other bytes")
    header, body = view[FIXED : FIXED + header_length], view[FIXED + header_length :]
    reader = Reader(header, "patch header")
    number = reader.byte()
    codec = next((c.name for c in CODECS.values() if c.number == number), None)
    if codec is None:
        raise reader.fail(f"codec {number} is unknown here")
    based = bool(reader.byte(1))
    most = (1 << 63) - 1
    base_version, base_digest = (reader.number(most), bytes(reader.raw(32))) if based else (None, None)
    version, digest = reader.number(most), bytes(reader.raw(32))
    patch = Patch(version, base_version, base_digest, digest, codec, _read_entries(reader, body, based, limits))
    if whole_digest(patch.specs, patch.tensor_digests) != digest:
        raise CorruptPatchError("the digest of the result is not that of its tensors")
    return patch
