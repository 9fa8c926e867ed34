"""The drill behind the chapter's sequence: real runs, and outcomes that are the old version or a new one."""

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("zstandard")

from dist_lib.pulse.drill import FAULTS, PARTS, run_drill
from dist_lib.pulse.drill_figure import drill_figure


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_old_or_new_and_back_on_the_newest_at_the_end(fault: str, part: str) -> None:
    drill = run_drill(fault, part)
    assert drill.identical and drill.served[0] == 0 and drill.served[1] in (0, 1)
    newest = 1 if fault == "publisher dies" or (fault == "torn write" and part != "marker") else 2
    assert drill.served[2] == newest, "a version that was never committed is published again under its number"
    assert any(not e.good for e in drill.events) == (fault != "none")


def test_what_is_written_first_is_read_last() -> None:
    events = run_drill("none", "payload").events
    written = [e.text for e in events if e.kind == "write"][:4]
    read = [e.text for e in events if e.kind == "read"][:4]
    assert written == ["patch 1", "manifest of patch 1", "marker of patch 1", "hint"] == read[::-1]


def test_faults_take_the_paths_that_the_page_describes() -> None:
    def texts(fault, part):
        return [e.text for e in run_drill(fault, part).events]

    assert "anchor 2" in texts("lost", "payload")[-3:] and "anchor 2" in texts("flipped", "manifest")[-3:]
    once = texts("flipped once", "payload")
    assert once.count("patch 1: damaged") == 1 and once.count("patch 1") == 2 and "serves 1" in once
    assert "starts again, finds 0" in texts("publisher dies", "marker")
    assert "starts again, finds 1" in texts("torn write", "marker")
    assert "anchor 0" in texts("receiver dies", "payload")
    late = texts("late", "payload")
    assert "patch 1: not there" in late and "patch 1" in late[late.index("patch 1: not there") :]
    with pytest.raises(ValueError, match="faults are"):
        run_drill("flood", "payload")


def test_the_figure_shows_each_combination() -> None:
    fig = drill_figure()
    assert {(t.meta["fault"], t.meta["part"]) for t in fig.data} == {(w, p) for w in FAULTS.values() for p in PARTS}
    assert "bit for bit" in fig.layout.meta["alt"]
    assert all(t.visible == (t.meta == {"fault": FAULTS["none"], "part": "payload"}) for t in fig.data)
