"""Checks: exercises that grade themselves, and equations that are compared with the code.

An exercise is a module of the learner's; a :class:`Check` is a function that raises when something is wrong. The
message that it raises is what the learner reads, so it says what was found and what to think about, never the answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """One thing that a solution must do.

    Attributes:
        name: what is asked, as a short sentence.
        run: takes the learner's module; raises to fail.
        hint: shown after a failure.
    """

    name: str
    run: Callable[[ModuleType], None]
    hint: str = ""


@dataclass(frozen=True)
class CheckResult:
    """What became of one check; ``message`` is empty when it passed."""

    name: str
    passed: bool
    message: str = ""
    hint: str = ""


@dataclass(frozen=True)
class GradeReport:
    """What became of all checks of one exercise."""

    exercise: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed; an exercise without checks does not pass."""
        return bool(self.results) and all(r.passed for r in self.results)


class NotSolvedYet(Exception):
    """Raised by a stub: the exercise has not been started."""


def grade(module: ModuleType, checks: Sequence[Check], exercise: str = "") -> GradeReport:
    """Run every check, also after a failure; a check never sees what another one did to shared tensors of its own."""
    results = []
    for check in checks:
        try:
            check.run(module)
        except NotSolvedYet as error:
            results.append(CheckResult(check.name, False, str(error) or "not solved yet", ""))
        except AssertionError as error:
            results.append(CheckResult(check.name, False, str(error) or "the result is wrong", check.hint))
        except Exception as error:  # the learner's code may raise anything, and must see where
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} (line {where.lineno} of {where.filename.rsplit('/', 1)[-1]})"
            results.append(CheckResult(check.name, False, message, check.hint))
        else:
            results.append(CheckResult(check.name, True))
    return GradeReport(exercise, tuple(results))


@dataclass(frozen=True)
class Equation:
    """A numbered equation, tied to the code that computes it.

    Attributes:
        label: its name within the chapter.
        latex: the formula.
        implemented_by: dotted name of the function that the reader should look at; empty for a definition.
        evaluate: the formula written out independently of the library.
        library: what the library gives for the same arguments.
        samples: argument tuples on which the two are compared.
        rtol: relative tolerance of the comparison (of the norm of the difference).
    """

    label: str
    latex: str
    implemented_by: str
    evaluate: Callable[..., Any]
    library: Callable[..., Any]
    samples: Sequence[tuple[Any, ...]]
    rtol: float = 1e-5

    def difference(self, *sample: Any) -> float:
        """Relative difference between formula and library on one sample; 0 means the same bits or integers."""
        ours, theirs = _flat(self.library(*sample)), _flat(self.evaluate(*sample))
        if ours.shape != theirs.shape:
            raise ValueError(f"equation {self.label}: shapes {tuple(ours.shape)} and {tuple(theirs.shape)} differ")
        scale = max(float(theirs.norm()), float(ours.norm()))
        return float((ours - theirs).norm()) / scale if scale else 0.0


def _flat(value: Any) -> Tensor:
    if isinstance(value, (tuple, list)):
        return torch.cat([_flat(v) for v in value]) if value else torch.zeros(0, dtype=torch.float64)
    return torch.as_tensor(value, dtype=torch.float64).flatten()
