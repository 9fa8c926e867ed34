"""Grading of a learner's file: loops without end, broken files and exits become a report, never a crash."""

import pytest

from labs import grading
from labs.framework import LabError
from labs.grading import exercise_names, grade_file

CHECKS = """
from dist_lib.checks import Check, NotSolvedYet


def doubles(module):
    got = module.double(3)
    assert got == 6, f"double(3) gave {got}"


CHECKS = {"double": [Check("it doubles", doubles, "add it to itself")]}
"""
STUB = """
from dist_lib.checks import NotSolvedYet


def double(x):
    raise NotSolvedYet("write double")
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Make a lab with one exercise; returns a function that writes a solution of it."""
    folder = tmp_path / "toy" / "exercises"
    folder.mkdir(parents=True)
    (folder / "checks.py").write_text(CHECKS)
    (folder / "double.py").write_text(STUB)
    monkeypatch.setattr(grading, "ROOT", tmp_path)
    monkeypatch.setattr(grading, "_grade_here", GradeBelow(tmp_path))

    def solution(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return solution


class GradeBelow:
    """The grading process with its labs in another folder: a fresh process knows nothing of a patched module."""

    def __init__(self, root):
        self.root = root

    def __call__(self, *arguments):
        grading.ROOT = self.root
        grading_function(*arguments)


grading_function = grading._grade_here


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def double(x):\n    return x + 3 - 1\n", "double(3) gave 5"),
        ("def double(x:\n    return 2 * x\n", "SyntaxError"),
        ("import nowhere_to_be_found\n", "nowhere_to_be_found"),
        ("def double(x):\n    return 2 * y\n", "NameError: name 'y' is not defined (line 2 of mine.py)"),
        ("import os\n\n\ndef double(x):\n    os._exit(3)\n", "ended with code 3"),
        (STUB, "write double"),
    ],
    ids=["wrong", "syntax", "import", "error", "exit", "stub"],
)
def test_what_is_wrong_with_a_file_is_said(write, text, words):
    report = grade_file("toy", "double", write(text))
    assert not report.passed
    assert words in " ".join(r.message for r in report.results)


def test_a_right_file_passes_and_its_prints_stay_out(write, capfd):
    assert grade_file("toy", "double", write("def double(x):\n    print('noise')\n    return x + x\n")).passed
    assert "noise" not in capfd.readouterr().out


def test_a_loop_without_end_is_ended(write):
    report = grade_file("toy", "double", write("def double(x):\n    while True:\n        pass\n"), time_limit_s=4.0)
    assert not report.passed and "did not finish within 4 s" in report.results[0].message


def test_the_learners_file_is_the_default_and_unknown_names_are_named(write, tmp_path):
    assert exercise_names("toy") == ["double"]
    assert "write double" in grade_file("toy", "double").results[0].message
    with pytest.raises(LabError, match="there are double"):
        grade_file("toy", "triple")
    with pytest.raises(LabError, match="there is no file"):
        grade_file("toy", "double", tmp_path / "absent.py")
