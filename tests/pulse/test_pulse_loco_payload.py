"""The coded update: bits come back, sizes stay within their bound, and no bytes can make the decoder misbehave."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_lib.pulse import CorruptPatchError
from dist_lib.pulse.codecs import SEGMENT
from dist_lib.pulse.loco_payload import FIXED, SparseUpdate, decode_update, encode_update, payload_bound, segment_sizes

WHERE = {"round": 7, "rank": 2}


def update(cells: int, density: float, seed: int = 0) -> SparseUpdate:
    generator = np.random.default_rng(seed)
    segments = []
    for size in segment_sizes(cells):
        positions = np.flatnonzero(generator.random(size) < density).astype(np.uint32)
        values = generator.normal(size=positions.size).astype(np.float32) * np.float32(1e-6)
        segments.append((positions, values))
    return SparseUpdate(cells=cells, segments=tuple(segments), **WHERE)


def same(a: SparseUpdate, b: SparseUpdate) -> bool:
    pairs = zip(a.segments, b.segments, strict=True)
    return (a.round, a.rank, a.cells) == (b.round, b.rank, b.cells) and all(
        np.array_equal(p, q) and np.array_equal(v.view(np.uint32), w.view(np.uint32)) for (p, v), (q, w) in pairs
    )


@pytest.mark.parametrize("density", [0.0, 0.0005, 0.08, 0.5, 1.0])
@pytest.mark.parametrize("cells", [1, 255, 256, 300_000])
def test_updates_come_back_bit_for_bit_and_within_the_bound(cells: int, density: float) -> None:
    sent = update(cells, density)
    data = encode_update(sent)
    assert same(decode_update(data, cells=cells, **WHERE), sent)
    assert data == encode_update(sent)
    assert len(data) <= payload_bound(cells)


def test_special_values_keep_their_bits() -> None:
    bits = np.array([0x80000000, 0x00000001, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0], np.uint32)  # -0, subnormals, max
    sent = SparseUpdate(
        cells=900, segments=((np.array([0, 1, 255, 511, 512, 899], np.uint32), bits.view("f4")),), **WHERE
    )
    assert same(decode_update(encode_update(sent), cells=900, **WHERE), sent)


def test_vectors_of_several_segments() -> None:
    cells = SEGMENT + 1000
    one = np.array([5], np.uint32), np.array([1.5], np.float32)
    none = np.empty(0, np.uint32), np.empty(0, np.float32)
    last = np.array([0, 999], np.uint32), np.array([-1.0, 2.0], np.float32)
    for segments in ((one, last), (none, last), (one, none), (none, none)):
        sent = SparseUpdate(cells=cells, segments=segments, **WHERE)
        assert same(decode_update(encode_update(sent), cells=cells, **WHERE), sent)


def test_a_coordinate_costs_little_more_than_its_value() -> None:
    cells = 400_000
    for density, most in ((0.08, 5.1), (1.0, 4.1)):
        assert len(encode_update(update(cells, density))) < most * density * cells
    assert len(encode_update(update(cells, 0.0))) < 60


def reseal(data: bytes) -> bytes:
    return data[:8] + hashlib.sha256(data[FIXED:]).digest() + data[FIXED:]


def test_another_round_rank_or_model_is_refused() -> None:
    data = encode_update(update(1000, 0.1))
    for expected in ({"round": 8}, {"rank": 1}, {"cells": 999}, {"cells": 1001}):
        with pytest.raises(CorruptPatchError, match=r"expected|not a message"):
            decode_update(data, **{"cells": 1000, **WHERE, **expected})


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = encode_update(update(600, 0.05))
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPatchError):
            decode_update(bytes(broken), cells=600, **WHERE)
    for end in range(len(data)):
        with pytest.raises(CorruptPatchError):
            decode_update(data[:end], cells=600, **WHERE)
        if end >= FIXED:
            with pytest.raises(CorruptPatchError):
                decode_update(reseal(data[:end]), cells=600, **WHERE)
    with pytest.raises(CorruptPatchError):
        decode_update(reseal(data + b"\0"), cells=600, **WHERE)


def test_values_that_are_not_finite_are_refused() -> None:
    for value in (np.nan, np.inf, -np.inf):
        sent = SparseUpdate(cells=9, segments=((np.array([3], np.uint32), np.array([value], np.float32)),), **WHERE)
        with pytest.raises(CorruptPatchError, match="not finite"):
            decode_update(encode_update(sent), cells=9, **WHERE)


BASE = encode_update(update(2000, 0.1))


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.tuples(st.integers(FIXED, len(BASE) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_hostile_messages_with_a_right_seal_are_refused_or_read_as_an_update(changes, data) -> None:
    """Whatever a sender writes, the outcome is an error of the format, or a valid update of the expected size."""
    message = bytearray(BASE)
    for at, value in changes:
        message[at] = value
    if data.draw(st.booleans()):
        at = data.draw(st.integers(FIXED, len(message)))
        message[at:at] = data.draw(st.binary(max_size=12))
    try:
        found = decode_update(reseal(bytes(message)), cells=2000, **WHERE)
    except CorruptPatchError:
        return
    (positions, values), *rest = found.segments
    assert not rest and positions.size == values.size and np.isfinite(values).all()
    assert positions.size == 0 or (int(positions[-1]) < 2000 and bool((np.diff(positions.astype(np.int64)) > 0).all()))


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_behind_a_right_seal_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptPatchError):
        decode_update(reseal(b"DLLOCO01" + bytes(32) + body), cells=2000, **WHERE)
