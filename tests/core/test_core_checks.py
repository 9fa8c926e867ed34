"""Grading and equations: what passes, what fails, and with which words."""

from types import ModuleType

import pytest
import torch

from dist_lib.checks import Check, Equation, GradeReport, NotSolvedYet, grade


def solution(body):
    module = ModuleType("solution")
    exec(body, module.__dict__)
    return module


def doubles(module):
    found = module.double(3)
    if found != 6:
        raise AssertionError(f"double(3) gave {found}")


CHECKS = [Check("doubles", doubles, "add it to itself"), Check("keeps zero", lambda m: doubles_zero(m))]


def doubles_zero(module):
    assert module.double(0) == 0


def test_a_right_solution_passes_every_check():
    report = grade(solution("def double(x): return x + x"), CHECKS, "double")
    assert report.passed and [r.name for r in report.results] == ["doubles", "keeps zero"]
    assert all(r.message == r.hint == "" for r in report.results)


def test_a_wrong_solution_is_told_what_it_gave_and_later_checks_still_run():
    report = grade(solution("def double(x): return x * x"), CHECKS, "double")
    first, second = report.results
    assert (first.passed, first.message, first.hint) == (False, "double(3) gave 9", "add it to itself")
    assert second.passed and not report.passed


def test_an_error_names_its_line():
    report = grade(solution("def double(x):\n    return x['a']"), CHECKS, "double")
    assert "TypeError" in report.results[0].message and "line 2" in report.results[0].message


def test_a_stub_is_not_solved_yet():
    module = solution(
        "from dist_lib.checks import NotSolvedYet\ndef double(x):\n    raise NotSolvedYet('write double')"
    )
    report = grade(module, CHECKS, "double")
    assert not report.passed and report.results[0].message == "write double"
    assert issubclass(NotSolvedYet, Exception)


def test_no_checks_is_no_pass():
    assert not GradeReport("none", ()).passed


def equation(evaluate, library, samples=((2.0,),)):
    return Equation("square", "x^2", "torch.square", evaluate, library, samples)


def test_an_equation_agrees_with_code_that_is_right_and_not_with_code_that_is_wrong():
    assert equation(lambda x: x**2, lambda x: x * x).difference(2.0) == 0.0
    assert equation(lambda x: x**2, lambda x: -(x**2)).difference(2.0) == pytest.approx(2.0)
    assert equation(lambda x: x**2, lambda x: x**2 * 1.01).difference(3.0) == pytest.approx(0.01, rel=0.02)


def test_an_equation_compares_nested_values_and_zeros_and_refuses_other_shapes():
    pair = equation(lambda x: (x, torch.zeros(2)), lambda x: [x, torch.zeros(2)])
    assert pair.difference(torch.ones(3)) == 0.0
    assert equation(lambda x: 0.0, lambda x: 0.0).difference(1.0) == 0.0
    assert equation(lambda x: 0.0, lambda x: 1e-30).difference(1.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="square"):
        equation(lambda x: torch.zeros(2), lambda x: torch.zeros(3)).difference(1.0)
