"""bench: pairs in turn, ratios of medians, targets, and the file of results. No time is asserted."""

import contextlib
import json
import sys
from types import ModuleType

import pytest
from rich.console import Console

from labs import bench, framework
from labs.bench import Measured, Pair, Row, find_rows, measure, run_rows
from labs.framework import LabError


def row(make=None, *, target=0.5, why_not=lambda: "", name="one"):
    pair = Pair(lambda: 1.0, lambda: 4.0, seconds=True)
    return Row(name=name, what="a thing", baseline="b", target=target, make=make or (lambda: pair), why_not=why_not)


@pytest.fixture
def labs_with(tmp_path, monkeypatch):
    def make(rows):
        (tmp_path / "labs" / "probe").mkdir(parents=True)
        for name in ("run.py", "bench.py"):
            (tmp_path / "labs" / "probe" / name).write_text("")
        module = ModuleType("labs.probe.bench")
        module.ROWS = rows
        monkeypatch.setattr(framework, "ROOT", tmp_path / "labs")
        monkeypatch.setitem(sys.modules, "labs.probe", ModuleType("labs.probe"))
        monkeypatch.setitem(sys.modules, "labs.probe.bench", module)
        monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")

    return make


def test_both_run_equally_often_and_take_turns_in_order():
    calls = []
    measured = measure("probe", row(lambda: Pair(lambda: calls.append("o"), lambda: calls.append("b"))), 4)
    assert "".join(calls) == "ob" + "obbo" * 2 and measured.pairs == 4


def test_the_ratio_is_the_median_over_pairs():
    ours, theirs = iter([9, 1.0, 2.0, 30.0, 4.0]), iter([9, 10.0, 10.0, 10.0, 10.0])
    measured = measure("probe", row(lambda: Pair(lambda: next(ours), lambda: next(theirs), seconds=True)), 4)
    assert measured.ratio == pytest.approx(0.3) and measured.ours_s == 3.0 and measured.baseline_s == 10.0
    assert measured.ratio_low < measured.ratio < measured.ratio_high


@pytest.mark.parametrize(("target", "met"), [(0.25, True), (0.2, False), (None, None)])
def test_a_target_is_met_missed_or_absent(target, met):
    assert measure("probe", row(target=target), 3).met is met


def test_what_cannot_run_here_is_said_and_not_counted_as_met():
    measured = measure("probe", row(lambda: 1 / 0, why_not=lambda: "needs a GPU"), 3)
    assert measured.skipped == "needs a GPU" and measured.met is None and measured.pairs == 0


def test_what_a_row_builds_is_closed_again():
    closed = []

    @contextlib.contextmanager
    def make():
        yield Pair(lambda: 1.0, lambda: 2.0, seconds=True)
        closed.append(True)

    assert measure("probe", row(make), 3).ratio == 0.5 and closed == [True]


def test_the_table_and_the_exit_follow_the_targets(labs_with, tmp_path):
    labs_with((row(name="good"), row(name="bad", target=0.1), row(name="gpu", why_not=lambda: "needs a GPU")))
    console = Console(record=True, width=200)
    assert run_rows(console, "probe", 3, True) is False
    text = console.export_text()
    assert "met" in text and "missed" in text and "needs a GPU" in text and "0.250" in text
    (path,) = (tmp_path / "results").iterdir()
    data = json.loads(path.read_text())
    assert sorted(data["rows"]) == ["probe/bad", "probe/good"] and data["rows"]["probe/good"]["met"] is True


def test_saving_keeps_rows_of_other_labs(tmp_path):
    for lab in ("a", "b"):
        path = bench.save(
            [Measured(lab, "one", "w", "b", None, pairs=3, ours_s=1.0, baseline_s=1.0, ratio=1.0)], tmp_path
        )
    assert sorted(json.loads(path.read_text())["rows"]) == ["a/one", "b/one"]
    path.write_text("{")
    with pytest.raises(LabError, match="move it away"):
        bench.save([], tmp_path)


def test_unknown_labs_and_double_rows_are_named(labs_with):
    labs_with((row(), row()))
    with pytest.raises(LabError, match="probe/one"):
        find_rows()
    with pytest.raises(LabError, match="no lab 'nothing'"):
        find_rows("nothing")


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ({"cpu": "AMD EPYC (tm) 7", "cores": 2}, "amd-epyc-tm-7-2-cores"),
        ({"cpu": "x", "cores": 2, "gpus": ["NVIDIA H200"]}, "1x-nvidia-h200"),
    ],
)
def test_the_file_is_named_after_the_kind_of_machine(hardware, name):
    assert bench.hardware_name(hardware) == name


def test_every_row_of_every_lab_is_well_formed():
    for lab, found in find_rows():
        assert found.name and found.what and found.baseline, (lab, found)
        assert found.target is None or found.target > 0
