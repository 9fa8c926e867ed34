"""Every numbered equation of every chapter against the library, and proof that a wrong one would be found."""

import dataclasses
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dist_lib.checks import Equation

BOOK = Path(__file__).resolve().parents[2] / "book"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"equations_of_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CHAPTERS = {path.parent.name: load(path).EQUATIONS for path in sorted(BOOK.glob("*/equations.py"))}
ALL = [pytest.param(e, id=f"{chapter}/{e.label}") for chapter, found in CHAPTERS.items() for e in found]


@pytest.mark.parametrize("equation", ALL)
def test_formula_and_library_agree(equation: Equation) -> None:
    assert equation.samples, "an equation without samples compares nothing"
    for sample in equation.samples:
        assert equation.difference(*sample) <= equation.rtol, sample


@pytest.mark.parametrize("equation", ALL)
def test_a_wrong_factor_is_found(equation: Equation) -> None:
    def scaled(*args: Any) -> Any:
        def times(value: Any) -> Any:
            return [times(v) for v in value] if isinstance(value, (tuple, list)) else value * 1.5 + 1e-9

        return times(equation.evaluate(*args))

    wrong = dataclasses.replace(equation, evaluate=scaled)
    assert max(wrong.difference(*s) for s in equation.samples) > equation.rtol


@pytest.mark.parametrize("equation", ALL)
def test_the_named_function_exists(equation: Equation) -> None:
    if not equation.implemented_by:
        return
    parts = equation.implemented_by.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name)
        return
    pytest.fail(f"{equation.implemented_by} cannot be imported")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_labels_are_unique_and_used(chapter: str) -> None:
    labels = [e.label for e in CHAPTERS[chapter]]
    assert len(labels) == len(set(labels))
    pages = "".join(p.read_text(encoding="utf-8") for p in (BOOK / chapter).iterdir() if p.suffix in {".md", ".ipynb"})
    unused = [label for label in labels if f"{chapter}/{label}" not in pages]
    assert not unused, f"equations that no page shows: {unused}"
