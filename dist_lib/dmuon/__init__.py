"""DMuon: Muon whose matrices each have one owner.

Every matrix is updated once, whole, by one rank: gradients are reduced to it and its result is published to all others.
The owner plan (:func:`make_plan`) says who owns what.

Source: DMuon (arXiv 2606.27153).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dist_lib.dmuon.costs import Cost, DeviceCost, FlopCost, MeasuredCost
from dist_lib.dmuon.plan import MatrixSpec, OwnerPlan, make_plan, matrix_specs

if TYPE_CHECKING:
    from dist_lib.dmuon.checkpoint import (
        latest_checkpoint,
        load_checkpoint,
        load_model_state_dict,
        model_state_dict,
        save_checkpoint,
    )
    from dist_lib.dmuon.config import Precision, RuntimeConfig
    from dist_lib.dmuon.ddp import DMuonDDP
    from dist_lib.dmuon.fsdp import DMuonFSDP
    from dist_lib.dmuon.optimizer import DMuon
    from dist_lib.dmuon.tensor_parallel import TensorParallelDMuon
    from dist_lib.dmuon.verify import VerifyReport, verify_model

# Found when they are first used: plans need no runtime, and a runtime takes a second to import.
_LATER = {
    "DMuon": "optimizer",
    "DMuonDDP": "ddp",
    "DMuonFSDP": "fsdp",
    "Precision": "config",
    "RuntimeConfig": "config",
    "TensorParallelDMuon": "tensor_parallel",
    "VerifyReport": "verify",
    "latest_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "load_model_state_dict": "checkpoint",
    "model_state_dict": "checkpoint",
    "save_checkpoint": "checkpoint",
    "verify_model": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


__all__ = [
    "Cost",
    "DMuon",
    "DMuonDDP",
    "DMuonFSDP",
    "DeviceCost",
    "FlopCost",
    "MatrixSpec",
    "MeasuredCost",
    "OwnerPlan",
    "Precision",
    "RuntimeConfig",
    "TensorParallelDMuon",
    "VerifyReport",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model_state_dict",
    "make_plan",
    "matrix_specs",
    "model_state_dict",
    "save_checkpoint",
    "verify_model",
]
