"""What the bench of the codecs stands on: parts that give back the new state, bounded bytes, rates that are right."""

import dataclasses

import numpy as np
import pytest
import torch

from dist_lib.pulse import diff, encode
from labs.framework import LabError
from labs.pulse import bench
from labs.pulse.codec_timing import Work, make_update, peak_bytes, synthetic_update, time_codec


@pytest.fixture(scope="module")
def update():
    return synthetic_update(1 << 18, lr=3e-6, steps=12)


def test_an_update_counts_tied_tensors_once_and_leaves_out_unchanged_ones():
    old = {"a": torch.randn(64, 64).bfloat16(), "b": torch.randn(9).bfloat16()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"].view(torch.int16)[3, :7] += 1
    old["tied"], new["tied"] = old["a"], new["a"]
    update = make_update(old, new)
    assert (update.cells, update.changed, len(update.segments)) == (64 * 64 + 9, 7, 1)


def test_parts_add_up_to_the_librarys_patch(update):
    for codec in ("paper", "fast", "small"):
        work = Work(update, codec)
        assert work.check() and sum(c.positions.size for c in work.changes) == update.changed
        timing = time_codec(update, codec, repeats=1)
        assert timing.nbytes == sum(map(len, work.coded)) and set(timing.seconds) == {
            "scan",
            "encode",
            "apply",
            "verify",
        }
    states = [
        {name: torch.from_numpy(side.view(np.int16)) for name, side in zip("ab", sides, strict=True)}
        for sides in ([s[0] for s in update.segments], [s[1] for s in update.segments])
    ]
    file = encode(diff(*states), "fast")
    assert 0 < len(file) - time_codec(update, "fast", repeats=1).nbytes < 400  # its header


def test_a_codec_that_loses_a_change_has_no_time(update, monkeypatch):
    wrong = dataclasses.replace(bench.CODECS["fast"], decode=lambda data, old, count, place, out: np.copyto(out, old))
    monkeypatch.setitem(bench.CODECS, "fast", wrong)
    monkeypatch.setattr("dist_lib.pulse.wire.Reader.end", lambda self: None)
    with pytest.raises(ValueError, match="does not give back"):
        time_codec(update, "fast", repeats=1)
    monkeypatch.setattr(bench, "masters", lambda: (update,))
    with pytest.raises(LabError, match="not the new state"):
        bench.checked("fast")


def test_a_codec_above_its_bytes_has_no_time(update, monkeypatch):
    monkeypatch.setattr(bench, "masters", lambda: (update,))
    assert len(bench.checked("small")) == 1
    monkeypatch.setitem(bench.SMALLER, "small", 0.01)
    with pytest.raises(LabError, match=r"above 0\.01"):
        bench.checked("small")
    monkeypatch.setitem(bench.SMALLER, "small", 1.0)
    monkeypatch.setattr(bench, "ABOVE_REFERENCE", 0.5)
    with pytest.raises(LabError, match=r"above 0\.5 x"):
        bench.checked("small")


def test_rows_time_what_they_say(update, monkeypatch):
    monkeypatch.setattr(bench, "masters", lambda: (update,))
    pair = bench.small_against_rate("encode")
    assert pair.baseline() == pytest.approx(update.changed / 25e6) and pair.ours() > 0
    assert bench.scan_against_rate().baseline() == pytest.approx(update.nbytes / 1.5e9)


def test_described_rates_follow_from_seconds(update):
    timing = dataclasses.replace(time_codec(update, "small", repeats=1), seconds={"scan": 0.5})
    found = bench.describe(update, timing)
    assert found["parts"]["scan"]["changed_per_s"] == update.changed / 0.5
    assert found["parts"]["scan"]["weights_gb_s"] == pytest.approx(2 * update.cells / 0.5 / 1e9)


def test_peak_memory_is_seen_where_the_system_tells():
    found = peak_bytes(lambda: np.ones(1 << 23))
    assert found == 0 or found > (1 << 25)
