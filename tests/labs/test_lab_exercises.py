"""Exercises of all labs: solutions and other right answers pass; stubs and planted wrong answers do not."""

import pytest

from labs.framework import lab_names
from labs.grading import ROOT, exercise_names, grade_file

LABS = [lab for lab in lab_names() if (ROOT / lab / "exercises").is_dir()]
FILES = [
    pytest.param(lab, file, id=f"{lab}-{file.parent.name}-{file.stem}")
    for lab in LABS
    for file in sorted((ROOT / lab / "exercises").rglob("*.py"))
    if file.stem not in ("checks", "__init__")
]


@pytest.mark.parametrize(("lab", "file"), FILES)
def test_graders_accept_right_and_reject_wrong(lab, file):
    report = grade_file(lab, file.stem.split("_")[0], file)
    should_pass = file.parent.name in ("solutions", "right")
    assert report.passed == should_pass, [r for r in report.results if r.passed != should_pass]


@pytest.mark.parametrize("lab", LABS)
def test_every_exercise_has_a_solution_a_second_right_answer_and_wrong_ones(lab):
    assert exercise_names(lab)
    folder = ROOT / lab / "exercises"
    for name in exercise_names(lab):
        assert (folder / f"{name}.py").is_file() and (folder / "solutions" / f"{name}.py").is_file()
        assert list((folder / "right").glob(f"{name}_*.py"))
        assert len(list((folder / "wrong").glob(f"{name}_*.py"))) >= 2
