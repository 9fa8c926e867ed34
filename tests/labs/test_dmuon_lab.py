"""The lab of owner-sharded Muon: equal to its twin, counted, resumable, drawn, its exercises graded."""

import pytest

from labs import grading
from labs.grading import exercise_names, grade_file

FILES = sorted((grading.ROOT / "dmuon" / "exercises").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_graders_accept_right_and_reject_wrong(file):
    if file.stem == "checks":
        names = exercise_names("dmuon")
        assert names == ["diverge", "lpt", "once", "payload"]
        for name in names:
            assert sum(f.parent.name == "wrong" and f.stem.startswith(f"{name}_") for f in FILES) >= 3
            assert sum(f.parent.name == "right" and f.stem.startswith(f"{name}_") for f in FILES) >= 1
        return
    report = grade_file("dmuon", file.stem.split("_")[0], file)
    should_pass = file.parent.name in ("solutions", "right")
    assert report.passed == should_pass, [r for r in report.results if r.passed != should_pass]
