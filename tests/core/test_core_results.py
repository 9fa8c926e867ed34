"""Run records: whole or not at all, read back the same, compared."""

import json
from dataclasses import replace

import pytest

from dist_lib import results
from dist_lib.results import RecordError, RunRecord


def record(**changes):
    plain = RunRecord(lab="probe", scale="toy", seed=0, config={"steps": 3, "rate": 0.1}, metrics={"loss": 1.5})
    return replace(plain, **changes)


def test_a_record_comes_back_as_it_was(tmp_path):
    path = results.save(record(history=[{"step": 1, "loss": 2.0}]), tmp_path / "a" / "b")
    assert results.load(path) == results.load(path.parent) == record(history=[{"step": 1, "loss": 2.0}])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()], ids=["nan", "inf", "object"])
def test_what_is_not_json_is_refused_and_the_old_record_stays(tmp_path, value):
    results.save(record(), tmp_path)
    with pytest.raises(RecordError, match="probe"):
        results.save(record(metrics={"loss": value}), tmp_path)
    assert results.load(tmp_path) == record()
    assert [p.name for p in tmp_path.iterdir()] == [results.RECORD]


def test_a_damaged_or_missing_record_is_named(tmp_path):
    with pytest.raises(RecordError, match="no run record"):
        results.load(tmp_path)
    path = results.save(record(), tmp_path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(RecordError, match="is not a run record"):
        results.load(tmp_path)
    path.write_text(json.dumps({**json.loads(text), "los": 1}))
    with pytest.raises(RecordError, match="los"):
        results.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    results.write_text(path, "old")

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        results.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_comparison_shows_settings_that_differ_and_every_metric():
    rows = results.compare([record(), record(config={"steps": 5, "rate": 0.1}, seed=1, metrics={"loss": 1.5, "x": 2})])
    assert rows == {"steps": [3, 5], "loss": [1.5, 1.5], "x": [None, 2], "seed": [0, 1]}


def test_hardware_does_not_name_the_machine():
    import platform

    text = json.dumps(results.hardware())
    assert platform.node() not in text or platform.node() in ("", "localhost")
    assert results.versions()["python"] == platform.python_version()
    assert results.peak_memory_bytes() > 10 * 2**20


def test_commit_outside_a_repository_is_empty(tmp_path):
    assert results.commit(tmp_path) == ""
