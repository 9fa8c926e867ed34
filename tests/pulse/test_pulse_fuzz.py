"""Bytes from strangers: decoders decode or refuse, and never do anything else, by two fuzzers."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.pulse import fuzz

DOORS = fuzz.Doors()
SEEDS = DOORS.seeds()


def test_valid_inputs_decode_at_every_door() -> None:
    doors = fuzz.Doors()
    assert {doors.try_one(seed) for seed in SEEDS} == {f"{door} decoded" for door in fuzz.DOORS}
    assert [doors.try_one(bytes([door])) for door in (0, 1, 3)] == [
        "file refused",
        "sealed refused",
        "manifest refused",
    ]


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes(data: bytes) -> None:
    DOORS.try_one(data)


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(1, len(data)))
        gone = draw(st.integers(0, 6))
        data[at : at + gone] = draw(st.binary(max_size=6))
    return bytes(data)


@settings(max_examples=800, deadline=None)
@given(edited())
def test_valid_inputs_edited(data: bytes) -> None:
    DOORS.try_one(data)


def test_a_hundred_thousand_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    """Guided by coverage where atheris is installed; on a slow machine it stops after 60 s."""
    assert fuzz.has_atheris() or sys.platform != "linux"
    found = fuzz.fuzz(100_000, seconds=60.0)
    print(found)
    assert found["inputs"] == 100_000 or found["seconds"] > 55
    refused = sum(count for outcome, count in found["outcomes"].items() if outcome.endswith("refused"))
    assert sum(found["outcomes"].values()) == found["inputs"] and 0 < refused < found["inputs"]
    assert found["growth_mib"] < 200


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that writes another change than it was given: edited segments that still decode show it."""
    doors = fuzz.Doors()
    encode = doors._encode
    monkeypatch.setattr(doors, "_encode", lambda codec, old, new, place: encode(codec, old, new[::-1].copy(), place))
    random, segments, found = np.random.default_rng(0), [seed for seed in SEEDS if seed[0] == 2], 0
    for i in range(300):
        try:
            doors.try_one(fuzz.mutate(segments[i % len(segments)], random, segments))
        except AssertionError:
            found += 1
    assert found > 0


def test_wrong_arguments_are_refused() -> None:
    for bad in ({"inputs": 0}, {"inputs": 5, "engine": "honggfuzz"}):
        with pytest.raises(ValueError, match="engine is auto"):
            fuzz.fuzz(**bad)  # type: ignore[arg-type]
