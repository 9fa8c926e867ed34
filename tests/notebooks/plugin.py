"""A pytest plugin on top of nbval: figures compared with a tolerance, notebooks that never ran refused.

nbval compares every output as text and passes a cell that was never executed. This plugin replaces its collector by one
that fails such a notebook at collection, and its comparison of plotly figures by one that wants the same traces, names,
types and lengths, and numbers within `layout.meta.rtol` of the stored figure (`ROUNDING` when it states none).
Used as `pytest --nbval -p tests.notebooks.plugin`.
"""

import base64
import math
from collections.abc import Generator, Iterator
from typing import Any

import nbformat
import numpy as np
import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

PLOTLY = "application/vnd.plotly.v1+json"
ROUNDING = 1e-12  # JSON writers disagree about the last digit of a double
DTYPES = {"i1", "i2", "i4", "u1", "u2", "u4", "f4", "f8"}
UNCOMPARED = {"image/png", "image/jpeg", "image/svg+xml"}


class NotebookGuardError(Exception):
    """A notebook does not show one complete run, top to bottom."""


def guard(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what is wrong with a notebook's stored state; empty for one complete run from top to bottom."""
    faults: list[str] = []
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        faults.append(
            f"execution counts are {counts}, not 1 to {len(cells)}: run it from top to bottom (`make execute`)"
        )
    if not cells:
        faults.append("it has no code cell; write such a page in Markdown")
    for number, cell in enumerate(cells, start=1):
        expected_error = bool({"raises-exception", "nbval-raises-exception"} & set(cell.metadata.get("tags", [])))
        for output in cell.outputs:
            if output.output_type == "error" and not expected_error:
                faults.append(f"code cell {number} stores the error {output.ename}")
            if UNCOMPARED & set(output.get("data", {})):
                faults.append(f"code cell {number} stores an image, which nobody compares; draw it with plotly")
        if "nbval-skip" in cell.metadata.get("tags", []) or "NBVAL_SKIP" in cell.source:
            faults.append(f"code cell {number} is skipped in the tests")
    return faults


def decode(value: Any) -> Any:
    """Turn plotly's typed arrays (`dtype`, `bdata`, `shape`) into lists, everywhere in a figure."""
    if isinstance(value, dict):
        if "bdata" in value and "dtype" in value:
            if value["dtype"] not in DTYPES:
                raise ValueError(f"typed array with dtype {value['dtype']!r}; allowed: {sorted(DTYPES)}")
            array = np.frombuffer(base64.b64decode(value["bdata"]), dtype="<" + value["dtype"])
            shape = [int(n) for n in str(value.get("shape", array.size)).split(",")]
            return array.reshape(shape).tolist()
        return {key: decode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    return value


def differences(stored: Any, computed: Any, rtol: float, place: str = "figure") -> Iterator[str]:
    """Yield each difference of two decoded figures; each number may differ by `rtol`, relative to the larger one."""
    number = (int, float)
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in sorted(stored.keys() | computed.keys()):
            if key not in stored or key not in computed:
                yield f"{place}.{key} is only in the {'computed' if key in computed else 'stored'} figure"
            else:
                yield from differences(stored[key], computed[key], rtol, f"{place}.{key}")
    elif isinstance(stored, list) and isinstance(computed, list):
        if len(stored) != len(computed):
            yield f"{place} has {len(computed)} entries, stored are {len(stored)}"
            return
        for index, (old, new) in enumerate(zip(stored, computed, strict=True)):
            yield from differences(old, new, rtol, f"{place}[{index}]")
    elif isinstance(stored, number) and isinstance(computed, number) and not isinstance(stored, bool):
        both_nan = math.isnan(stored) and math.isnan(computed)
        if not both_nan and stored != computed and not math.isclose(stored, computed, rel_tol=rtol, abs_tol=0.0):
            yield f"{place} is {computed!r}, stored is {stored!r} (relative tolerance {rtol})"
    elif type(stored) is not type(computed) or stored != computed:
        yield f"{place} is {computed!r}, stored is {stored!r}"


def tolerance(figure: dict[str, Any]) -> float:
    """Return the relative tolerance that a stored figure states in `layout.meta.rtol`, else `ROUNDING`."""
    meta = figure.get("layout", {}).get("meta", {})
    rtol = float(meta.get("rtol", ROUNDING)) if isinstance(meta, dict) else ROUNDING
    if not 0.0 <= rtol <= 0.5:
        raise ValueError(f"layout.meta.rtol is {rtol}; allowed: 0 to 0.5")
    return rtol


def compare_figures(stored: dict[str, Any], computed: dict[str, Any]) -> list[str]:
    """Return the differences of two plotly figures under the stored figure's tolerance, at most five."""
    stored, computed = decode(stored), decode(computed)
    found: list[str] = []
    for difference in differences(stored, computed, tolerance(stored)):
        found.append(difference)
        if len(found) == 5:
            break
    return found


class BookCell(IPyNbCell):
    """A code cell whose plotly figures are compared with tolerance and everything else as nbval does."""

    def compare_outputs(self, test: list[Any], ref: list[Any], skip_compare: Any = None) -> bool:
        """Compare the outputs of the run with the stored ones."""
        skipped = (*(skip_compare or self.parent.skip_compare), PLOTLY)
        if not super().compare_outputs(test, ref, skip_compare=skipped):
            return False
        stored, computed = (
            [out["data"][PLOTLY] for out in outs if PLOTLY in out.get("data", {})] for outs in (ref, test)
        )
        if len(stored) != len(computed):
            self.comparison_traceback.append(f"{len(computed)} figures, stored are {len(stored)}")
            return False
        for number, (old, new) in enumerate(zip(stored, computed, strict=True), start=1):
            found = compare_figures(old, new)
            if found:
                self.comparison_traceback += [f"figure {number} of the cell differs from the stored one:", *found]
                return False
        return True


class BookNotebook(IPyNbFile):
    """A notebook that is guarded before its cells are collected."""

    def collect(self) -> Iterator[BookCell]:
        """Yield the cells, or fail naming what is wrong with the stored state."""
        faults = guard(nbformat.read(str(self.path), as_version=4))
        if faults:
            raise NotebookGuardError(f"{self.nodeid}: " + "; ".join(faults))
        for item in super().collect():
            yield BookCell.from_parent(
                self, name=item.name, cell_num=item.cell_num, cell=item.cell, options=item.options
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        """Show the guard's sentence alone."""
        return str(excinfo.value) if excinfo.errisinstance(NotebookGuardError) else super().repr_failure(excinfo)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Replace nbval's collector by ours."""
    collected = yield
    return [BookNotebook.from_parent(parent, path=c.path) if type(c) is IPyNbFile else c for c in collected]
