"""Damaged and hostile patches: the outcome is the old state or the new one, never a third, and never a crash."""

import hashlib
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_lib.pulse.codecs import CODECS, Place, decode_segment, encode_segment
from dist_lib.pulse.errors import CorruptPatchError, LimitError, StaleBaseError
from dist_lib.pulse.format import FIXED, Limits
from dist_lib.pulse.patch import apply, decode, diff, encode
from dist_lib.pulse.state import TensorSpec, digest_state
from dist_lib.pulse.wire import Reader, Writer, pack

NAMES = tuple(CODECS)


def pair() -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(1)
    base = {"a.w": (torch.randn(16, 8, generator=generator) * 0.02).bfloat16(), "a.b": torch.zeros(3)}
    new = {"a.w": base["a.w"].clone(), "a.b": base["a.b"], "c": torch.arange(4)}
    new["a.w"].view(torch.int16).view(-1)[::9] += 1
    return base, new


def reseal(data: bytes) -> bytes:
    """Make sizes and seal of altered bytes right again, so that only the deeper checks are left."""
    return data[:20] + hashlib.sha256(data[8:20] + data[FIXED:]).digest() + data[FIXED:]


def outcome(data: bytes, base: dict, old: bytes, new: bytes) -> str:
    """What a receiver holds after it was given ``data``; a third state or another error fails the test."""
    try:
        result = apply(decode(data), base)
    except (CorruptPatchError, StaleBaseError):
        assert digest_state(base).whole == old
        return "old"
    assert digest_state(result).whole == new
    return "new"


@pytest.mark.parametrize("codec", NAMES)
def test_every_flipped_byte_and_every_truncation(codec: str) -> None:
    base, new = pair()
    data = encode(diff(base, new), codec, workers=1)
    before, after = digest_state(base).whole, digest_state(new).whole
    for i in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            assert outcome(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :], base, before, after) == "old"
        assert outcome(data[:i], base, before, after) == "old"
    assert outcome(data + b"\0", base, before, after) == "old"
    assert outcome(data, base, before, after) == "new"


@pytest.mark.parametrize("codec", NAMES)
def test_flips_behind_a_right_seal(codec: str) -> None:
    """Whoever forges the seal still cannot lead to a third state, but may rename the version."""
    base, new = pair()
    data = encode(diff(base, new), codec, workers=1)
    before, after = digest_state(base).whole, digest_state(new).whole
    seen = {"old": 0, "new": 0}
    for i in range(FIXED, len(data)):
        for flip in (1, 2, 0x40, 0x80):
            forged = reseal(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])
            try:
                result = apply(decode(forged), base)
            except (CorruptPatchError, StaleBaseError):
                seen["old"] += 1
            else:
                assert digest_state(result).whole == decode(forged).digest
                seen["new"] += int(digest_state(result).whole == after)
    assert digest_state(base).whole == before
    assert seen["old"] > 10 * seen["new"]


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(junk: bytes, dressed: bool) -> None:
    if dressed:
        sizes = len(junk).to_bytes(4, "little") + bytes(8)
        junk = reseal(b"DLPULSE1" + sizes + bytes(32) + junk)
    with pytest.raises(CorruptPatchError):
        decode(junk)


@st.composite
def damaged_segments(draw: st.DrawFn) -> tuple[str, torch.dtype, int, bytes]:
    """A right segment with edits, or bytes that were never one, decompressed payload included."""
    codec = draw(st.sampled_from(NAMES))
    dtype, width = draw(st.sampled_from([(torch.bfloat16, 2), (torch.float32, 4), (torch.uint8, 1), (torch.int64, 8)]))
    seed = draw(st.integers(0, 50))
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 14, 300).astype(f"u{width}") if width > 1 else rng.integers(0, 256, 300).astype("u1")
    new = old.copy()
    new[rng.random(300) < draw(st.sampled_from([0.01, 0.3, 0.9]))] += 1
    data = bytearray(encode_segment(CODECS[codec], old, new, Place(TensorSpec(dtype, (30, 10)), 0)))
    for _ in range(draw(st.integers(0, 3))):
        if not data:
            break
        i, kind = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 2))
        if kind == 0:
            data[i] = draw(st.integers(0, 255))
        elif kind == 1:
            data[i:i] = draw(st.binary(max_size=3))
        else:
            del data[i : i + draw(st.integers(1, 4))]
    return codec, dtype, seed, bytes(data)


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # compiles in first draws
@given(damaged_segments())
def test_damaged_segments_decode_canonically_or_not_at_all(case: tuple[str, torch.dtype, int, bytes]) -> None:
    codec, dtype, seed, data = case
    width = min(dtype.itemsize, 8)
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 14, 300).astype(f"u{width}") if width > 1 else rng.integers(0, 256, 300).astype("u1")
    place = Place(TensorSpec(dtype, (30, 10)), 0)
    try:
        new = decode_segment(CODECS[codec], memoryview(data), old, place)
    except CorruptPatchError:
        return
    assert new.shape == old.shape and new.dtype == old.dtype
    again = decode_segment(CODECS[codec], memoryview(encode_segment(CODECS[codec], old, new, place)), old, place)
    assert (again == new).all()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["paper", "fast"]), st.binary(max_size=60), st.integers(1, 12), st.data())
def test_damaged_content_behind_right_compression(codec: str, raw: bytes, count: int, data: st.DataObject) -> None:
    old = np.arange(300, dtype=np.uint16)
    out = Writer()
    out.number(count)
    if codec == "paper":
        size, head = count * 5, bytes([1, 2])
    else:
        escapes, wide = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2))
        size, head = 2 * count + escapes + 2 * wide, bytes([escapes, wide])
    out.raw(head + pack(raw.ljust(size, b"\1")[:size]))
    try:
        new = decode_segment(CODECS[codec], memoryview(out.done()), old, Place(TensorSpec(torch.bfloat16, (30, 10)), 0))
    except CorruptPatchError:
        return
    assert int((new != old).sum()) == count


def claim(spec_bytes: bytes, segments: list[bytes], kind: int = 3) -> bytes:
    """A sealed anchor with one tensor whose entry is made of these bytes."""
    out = Writer()
    for byte in (2, 0, 0):
        out.byte(byte)
    out.raw(bytes(32))
    out.number(1)
    out.raw(bytes([0, 1]) + b"w" + bytes([kind]) + spec_bytes + bytes(32))
    for segment in segments:
        out.number(len(segment))
    header, body = out.done(), b"".join(segments)
    sizes = len(header).to_bytes(4, "little") + len(body).to_bytes(8, "little")
    return reseal(b"DLPULSE1" + sizes + bytes(32) + header + body)


def number(value: int) -> bytes:
    out = Writer()
    out.number(value)
    return out.done()


def test_claims_are_refused_before_memory_is_spent() -> None:
    huge = bytes([18, 1]) + number(1 << 39)
    wide = bytes([18, 2]) + number(1 << 62) + number(0)
    tracemalloc.start()
    for data in (
        claim(huge, []),
        claim(wide, []),
        claim(bytes([18, 65]), []),
        claim(bytes([99, 0]), []),
        claim(bytes([18, 1]) + number(1 << 30), []),
        b"DLPULSE1" + b"\xff" * 12 + bytes(32),
    ):
        with pytest.raises(CorruptPatchError):
            decode(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with pytest.raises(LimitError, match="granted are 100"):
        decode(encode(diff(None, {"w": torch.zeros(26)})), Limits(state_bytes=100))
    with pytest.raises(LimitError, match="header"):
        decode(encode(diff(None, {"w": torch.zeros(26)})), Limits(header_bytes=10))


def test_a_compression_bomb_is_not_inflated() -> None:
    bomb = pack(bytes(1 << 26))
    tracemalloc.start()
    read = Reader(b"", "x")
    old = np.arange(300, dtype=np.uint16)
    place = Place(TensorSpec(torch.bfloat16, (300,)), 0)
    for codec, head in (("paper", bytes([5, 1, 2])), ("fast", bytes([5, 0, 0]))):
        with pytest.raises(CorruptPatchError, match="are expected"):
            decode_segment(CODECS[codec], memoryview(head + bomb), old, place)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert read.left == 0


@pytest.mark.parametrize(
    "raw",
    [b"\x80\x00", b"\xff" * 12, b"\x80", b""],
    ids=["padded", "endless", "cut", "absent"],
)
def test_numbers_have_one_form(raw: bytes) -> None:
    with pytest.raises(CorruptPatchError):
        Reader(raw, "test").number(1 << 62)


def test_names_out_of_order_twice_or_unprintable() -> None:
    base, new = pair()
    data = encode(diff(base, new), "fast")
    for old_name, forged in ((b"c\x03", b"\n\x03"), (b"c\x03", b"A\x03")):
        assert old_name in data
        with pytest.raises(CorruptPatchError):
            decode(reseal(data.replace(old_name, forged, 1)))
