"""The tests of the notebook tests: a planted fault of each kind must fail and name the notebook."""

import base64
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import yaml

from tests.notebooks.plugin import PLOTLY, compare_figures, decode, guard
from tools.run_tests import notebooks

ROOT = Path(__file__).resolve().parents[2]
FIGURE = {"data": [{"type": "bar", "y": [1.0, 2.0]}], "layout": {"meta": {"rtol": 0.01}}}
SHOW = f"from IPython.display import display; display({{'{PLOTLY}': {FIGURE!r}}}, raw=True)"


def good_notebook() -> nbformat.NotebookNode:
    """A notebook as `make execute` leaves it: a printed number and a figure."""
    v4 = nbformat.v4
    printed = v4.new_code_cell("print(6 * 7)", execution_count=1, outputs=[v4.new_output("stream", text="42\n")])
    shown = v4.new_output("display_data", data={PLOTLY: FIGURE})
    cells = [printed, v4.new_code_cell(SHOW, execution_count=2, outputs=[shown])]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


def run_nbval(tmp_path: Path, notebook: nbformat.NotebookNode) -> tuple[int, str]:
    path = tmp_path / "planted.ipynb"
    nbformat.write(notebook, path)
    options = ["-p", "tests.notebooks.plugin", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={tmp_path}", *options, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout + done.stderr


def test_a_good_notebook_passes(tmp_path: Path) -> None:
    status, output = run_nbval(tmp_path, good_notebook())
    assert status == 0, output
    assert "2 passed" in output


def raise_in_cell(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[0].source = "1 / 0"


def change_number(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[0].outputs[0].text = "43\n"


def change_figure(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[1].outputs[0]["data"][PLOTLY] = json.loads(json.dumps(FIGURE).replace("2.0", "2.1"))


def drop_figure(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[1].outputs = []


def strip_outputs(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        cell.execution_count, cell.outputs = None, []


PLANTED = [
    (raise_in_cell, "ZeroDivisionError"),
    (change_number, "43"),
    (change_figure, "figure 1 of the cell differs"),
    (drop_figure, PLOTLY),
    (strip_outputs, "execution counts are"),
]


@pytest.mark.parametrize(("plant", "message"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_fails_and_names_the_notebook(plant, message, tmp_path: Path) -> None:
    notebook = good_notebook()
    plant(notebook)
    status, output = run_nbval(tmp_path, notebook)
    assert status != 0, output
    assert "planted.ipynb" in output
    assert message in output


def test_tolerance_is_the_stored_figures_own() -> None:
    near, far = copy.deepcopy(FIGURE), copy.deepcopy(FIGURE)
    near["data"][0]["y"][1], far["data"][0]["y"][1] = 2.015, 2.03
    assert compare_figures(FIGURE, near) == []
    assert len(compare_figures(FIGURE, far)) == 1
    exact = {"data": FIGURE["data"], "layout": {}}
    assert compare_figures(exact, {"data": near["data"], "layout": {}}) != []


@pytest.mark.parametrize("change", ["name", "type", "length", "trace"])
def test_structure_is_compared_exactly(change: str) -> None:
    other = copy.deepcopy(FIGURE)
    trace = other["data"][0]
    if change == "trace":
        other["data"].append(dict(trace))
    elif change == "length":
        trace["y"].append(3.0)
    else:
        trace[change] = "scatter"
    assert compare_figures(FIGURE, other) != []


def test_typed_arrays_are_decoded() -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    packed = {"dtype": "f4", "bdata": base64.b64encode(values.tobytes()).decode(), "shape": "2, 3"}
    assert decode({"z": packed}) == {"z": values.tolist()}


def test_guard_reports_errors_skips_and_images() -> None:
    notebook = good_notebook()
    notebook.cells[0].metadata["tags"] = ["nbval-skip"]
    notebook.cells[0].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])]
    notebook.cells[1].outputs[0]["data"] = {"image/png": ""}
    assert len(guard(notebook)) == 3
    assert guard(good_notebook()) == []


def toc_files(node: object) -> list[str]:
    """Every page that the table of contents names."""
    if isinstance(node, list):
        return [name for entry in node for name in toc_files(entry)]
    if isinstance(node, dict):
        own = [node[key] for key in ("file", "root") if key in node]
        return own + [name for value in node.values() for name in toc_files(value)]
    return []


def test_every_notebook_of_the_book_is_tested() -> None:
    tested = set(notebooks(ROOT))
    pages = toc_files(yaml.safe_load((ROOT / "_toc.yml").read_text()))
    in_book = {f"{page}.ipynb" for page in pages if (ROOT / f"{page}.ipynb").exists()}
    assert in_book, "the book has no notebook"
    assert in_book <= tested
    exercises = {name for name in tested if "/exercises/" in name}
    assert tested - in_book - exercises == set(), "notebooks outside the table of contents"
