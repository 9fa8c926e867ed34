"""DMuon: Muon whose matrices each have one owner.

Every matrix is updated once, whole, by one rank: gradients are reduced to it and its result is published to all others.
The owner plan (:func:`make_plan`) says who owns what.

Source: DMuon (arXiv 2606.27153).
"""

from dist_lib.dmuon.costs import Cost, DeviceCost, FlopCost, MeasuredCost
from dist_lib.dmuon.plan import MatrixSpec, OwnerPlan, make_plan, matrix_specs

__all__ = [
    "Cost",
    "DeviceCost",
    "FlopCost",
    "MatrixSpec",
    "MeasuredCost",
    "OwnerPlan",
    "make_plan",
    "matrix_specs",
]
