"""Time an optimizer step of owner-sharded Muon against Muon that gathers everything everywhere, and against AdamW."""

from __future__ import annotations

from labs.bench import Pair, Row
from labs.dmuon.timing import Work, measure
from labs.framework import LabError

WORK = Work(model="small-4m", ranks=4)


def checked_seconds(name: str, work: Work) -> float:
    """Seconds of a step of one method.

    Raises:
        LabError: its bytes are not those of the formulas, or it orthogonalised more or less often than it should: then
            its time says nothing.
    """
    timing = measure(name, work)
    if timing.payload != timing.formula:
        raise LabError(f"{name}: counted {timing.payload} bytes a step by rank, the formulas say {timing.formula}")
    times = {"dmuon": 1, "all-to-all": 1, "adamw": 0}.get(name, work.ranks)
    if timing.orthogonalised != times:
        raise LabError(f"{name}: a matrix went through Newton-Schulz {timing.orthogonalised:g} times, not {times}")
    return timing.step_s


def against(name: str, work: Work = WORK) -> Pair:
    """Owners and another method on the same gradients."""
    return Pair(lambda: checked_seconds("dmuon", work), lambda: checked_seconds(name, work), seconds=True)


ROWS = (
    Row(
        name="owner-step",
        what="Muon step with one owner a matrix, 4 gloo ranks of one thread, d = 256 (42 matrices): from local "
        "gradients to new weights on all ranks",
        baseline="Muon that gathers everything everywhere, same kernels",
        target=0.35,
        make=lambda: against("gather"),
    ),
    Row(
        name="owner-step-adamw",
        what="the same step with owners",
        baseline="AdamW for every parameter, its state cut evenly over the ranks",
        target=None,
        make=lambda: against("adamw"),
    ),
)
