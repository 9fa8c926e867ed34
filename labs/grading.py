"""Grades the exercises of a lab offline, in a process of its own with a time limit.

An exercise ``ex`` of a lab is ``exercises/ex.py`` (the learner's file), ``exercises/checks.py`` with
``CHECKS["ex"]``, and reference, planted wrong and differently written right solutions beside it for the tests.
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from dist_lib.checks import CheckResult, GradeReport, grade
from labs.framework import ROOT, LabError

TIME_LIMIT_S = 60.0


def exercise_names(lab: str) -> list[str]:
    """Exercises of a lab, in alphabetical order."""
    folder = ROOT / lab / "exercises"
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("checks", "__init__"))


def _load(path: Path, name: str) -> object:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LabError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that dataclasses and pickling inside it work
    spec.loader.exec_module(module)
    return module


def _grade_here(lab: str, exercise: str, file: str, results: Connection) -> None:
    import torch

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (a learner's prints do not belong into the report)
    torch.set_num_threads(1)
    try:
        checks = _load(ROOT / lab / "exercises" / "checks.py", "exercise_checks").CHECKS[exercise]  # type: ignore[attr-defined]
        try:
            module = _load(Path(file), f"exercise_{exercise}")
        except Exception as error:
            where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            message = f"{type(error).__name__}: {error}{where}"
            results.send(GradeReport(exercise, (CheckResult("the file can be imported", False, message),)))
            return
        results.send(grade(module, checks, exercise))  # type: ignore[arg-type]
    finally:
        results.close()


def grade_file(lab: str, exercise: str, file: Path | None = None, *, time_limit_s: float = TIME_LIMIT_S) -> GradeReport:
    """Grade one exercise.

    Args:
        lab: name of the lab.
        exercise: name of the exercise.
        file: the solution; default: the learner's file in the lab's folder.
        time_limit_s: after which it is failed.

    Raises:
        LabError: an unknown exercise or a missing file.
    """
    if exercise not in exercise_names(lab):
        raise LabError(
            f"lab {lab!r} has no exercise {exercise!r}; there are {', '.join(exercise_names(lab)) or 'none'}"
        )
    path = file or ROOT / lab / "exercises" / f"{exercise}.py"
    if not path.exists():
        raise LabError(f"there is no file {path}")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_grade_here, args=(lab, exercise, str(path), send), daemon=False)
    process.start()
    send.close()
    try:
        if not receive.poll(time_limit_s):
            message = f"it did not finish within {time_limit_s:g} s: does a loop or a collective wait for ever?"
            return GradeReport(exercise, (CheckResult("it finishes", False, message),))
        report: GradeReport = receive.recv()
        return report
    except EOFError:
        process.join(5)
        message = f"the process ended with code {process.exitcode} before a result"
        return GradeReport(exercise, (CheckResult("it finishes", False, message),))
    finally:
        receive.close()
        process.join(0.5)
        process.kill()
        process.join(5)
