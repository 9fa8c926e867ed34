"""What the bench of the 8-bit all-reduce stands on: bytes as predicted on both sides, and a refusal of others."""

import pytest

from labs.agoq import bench, shaped
from labs.agoq.shaped import NAMES, Work, formula, measure
from labs.framework import LabError
from labs.shaped_link import shaped_link, why_not

TINY = Work(numel=2**19, repeats=1, megabits_per_s=500)


def test_formulas():
    work = Work()
    assert work.numel >= 16e6
    payload, sent = formula("float32", work)
    assert payload == sent == 4 * 2**24
    assert formula("bfloat16", work) == (payload // 2, sent // 2)
    eight = formula("int8", work)
    assert eight == formula("dynamic8", work)
    assert eight[1] == 2**24 * (1 + 4 / 256) and eight[0] == 1.5 * eight[1]
    assert formula("float32", Work(ranks=4)) == (payload, sent * 3 // 2)
    assert sent / eight[1] == pytest.approx(3.938, abs=0.001)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["int8", "float32"])
def test_ranks_meet_over_the_link_and_their_bytes_are_those_of_the_formula(name):
    if reason := why_not():
        pytest.skip(reason)
    with shaped_link(2, megabits_per_s=TINY.megabits_per_s) as link:
        timing = measure(name, link, TINY)  # refuses bytes that are not the formula's
    least = 8 * (formula(name, TINY)[1] - 2**18) / (TINY.megabits_per_s * 1e6)  # a burst of 256 KiB is free
    assert timing.seconds > least
    assert timing.error < (0.012 if name == "int8" else 1e-6)
    assert (timing.error > 0.001) is (name == "int8")
    assert len(timing.sent) == len(timing.payload) == 2


@pytest.mark.parametrize(
    ("payload", "sent", "message"),
    [
        (5, 2**19 * 4, "ranks handed"),
        (2**19 * 4, 2**19 * 4 - 1, "hosts sent"),
        (2**19 * 4, 2**19 * 5, "hosts sent"),
    ],
)
def test_other_bytes_are_refused(monkeypatch, payload, sent, message):
    monkeypatch.setattr(shaped, "launch", lambda *_, **__: [([0.5], payload, sent, 0.0)] * 2)
    link = shaped.ShapedLink((), TINY.megabits_per_s)
    with pytest.raises(LabError, match=message):
        measure("float32", link, TINY)


def test_slowest_rank_and_median_repeat_count(monkeypatch):
    found = [([1.0, 5.0, 2.0], 2**21, 2**21, 0.1), ([3.0, 1.0, 1.0], 2**21, 2**21, 0.2)]
    monkeypatch.setattr(shaped, "launch", lambda *_, **__: found)
    timing = measure("float32", shaped.ShapedLink((), 1.0), TINY)
    assert timing.seconds == 3.0 and timing.error == 0.2


def test_rows():
    targets = {row.name: row.target for row in bench.ROWS}
    assert targets["all-reduce"] == 0.35 and sum(t is not None for t in targets.values()) == 1
    assert all(row.why_not is why_not for row in bench.ROWS)
    assert {row.what.split()[0] for row in bench.ROWS} | {"float32"} == set(NAMES)
