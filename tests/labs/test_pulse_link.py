"""A small sync over a real narrow link and through the proxy: bytes and bits, never times."""

import pytest

from labs.pulse import link, stream
from labs.pulse.proxy import Path as Way
from labs.shaped_link import why_not

WORK = link.Work(cells=400_000, versions=2, compute_s=0.01)


def check(found: list[link.Syncs], subscribers: int) -> None:
    patch, full = found
    assert (patch.mode, full.mode) == ("patch", "full") and patch.equal and full.equal
    assert len(patch.seconds) == WORK.versions and len(full.seconds) == 1 and patch.subscribers == subscribers
    state = 2 * WORK.cells + 32
    assert state < full.nbytes < state + 1000
    assert 500 < patch.nbytes < state / 20  # about one cell in a hundred moved


def test_patches_and_full_copies_arrive_without_a_link() -> None:
    found = link.measure(None, 1, WORK)
    check(found, 1)
    assert link.closed_form(found[0], found[0]) == found[0].median_s


def test_patches_and_full_copies_arrive_over_a_narrow_link() -> None:
    """Two million bits of weights at 100 Mbit/s to two subscribers; a full copy cannot be faster than the link."""
    if reason := why_not():
        pytest.skip(reason)
    found = link.measure(100.0, 2, WORK)
    check(found, 2)
    for syncs in found:
        form = link.closed_form(syncs, link.Syncs(syncs.mode, None, 2, syncs.nbytes, (0.5,), 0.5, True))
        assert form == pytest.approx(0.5 + 16 * syncs.nbytes / (100e6 * link.SHARE))
    assert found[1].median_s > 16 * found[1].nbytes / 100e6  # a lower bound by physics


def test_patches_arrive_over_slow_and_lossy_paths() -> None:
    rows = link.over_paths(WORK, [Way(), Way(0.005, 0.05, 0.01)])
    assert [row["requests"] for row in rows] == [rows[0]["requests"]] * 2
    assert rows[0]["lost"] == 0 and len(rows[1]["seconds"]) == WORK.versions
    assert min(rows[1]["seconds"]) > rows[1]["requests"] * 0.01  # each request waits for a round trip


def test_without_a_stream_or_the_rights_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(link, "why_not", lambda: "a shaped link needs root")
    assert link.main([]) == 0 and capsys.readouterr().out == "skipped: a shaped link needs root\n"
    monkeypatch.setattr(stream, "stream_folder", lambda lr, storage: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"python -m labs\.pulse\.stream"):
        next(link.states(link.Work()))
