"""Loading optimizer state: from ``torch.optim.Muon`` too, and without losing the buffers' dtype.

torch casts every loaded buffer to the dtype of its parameter; momentum of half-precision weights is float32 here and
must stay so, or the steps after a restart differ from those of a run without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dist_lib.optim.scales import per_step_coefficients

BUFFER = "momentum_buffer"
TORCH_ONLY = frozenset({"eps", "adjust_lr_fn"})


def buffer_dtype(p: Tensor) -> torch.dtype:
    """Dtype of the momentum of a parameter: float32 for half types, otherwise the parameter's own."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def is_torch_muon(state_dict: Mapping[str, Any]) -> bool:
    """Whether this is the ``state_dict`` of a ``torch.optim.Muon``."""
    return any(set(group) >= TORCH_ONLY for group in state_dict["param_groups"])


def from_torch_muon(state_dict: Mapping[str, Any], current: list[dict[str, Any]]) -> dict[str, Any]:
    """Translate the state of ``torch.optim.Muon``.

    Options that both have come from ``state_dict``; what only ours has stays as in ``current``. torch's buffer is a
    moving average, ``B <- mu B + (1 - mu) g``; for groups with ``momentum_form="heavy_ball"`` it is divided by
    ``1 - mu``. torch's ``eps`` has no counterpart: the norm here needs none.

    Args:
        state_dict: of ``torch.optim.Muon``; not changed.
        current: the parameter groups of the optimizer that will load it.
    """
    groups, state = [], {}
    for saved, ours in zip(state_dict["param_groups"], current, strict=False):
        group = {k: v for k, v in ours.items() if k not in ("params", "param_names")}
        group |= {k: v for k, v in saved.items() if k not in TORCH_ONLY}
        group["scale"] = saved["adjust_lr_fn"] or "original"
        group["ns_coefficients"] = per_step_coefficients(saved["ns_coefficients"], saved["ns_steps"])
        factor = 1.0 / (1.0 - saved["momentum"]) if ours["momentum_form"] == "heavy_ball" else 1.0
        for key in saved["params"]:
            if key in state_dict["state"]:
                state[key] = {BUFFER: state_dict["state"][key][BUFFER] * factor}
        groups.append(group)
    return {"state": state, "param_groups": groups}


def matched_buffers(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of parameter and saved momentum, in the order of the groups.

    Raises:
        ValueError: numbers of parameters or shapes that differ.
    """
    saved = [g["params"] for g in state_dict["param_groups"]]
    ours = [g["params"] for g in groups]
    if [len(s) for s in saved] != [len(o) for o in ours]:
        raise ValueError(
            f"the saved state has groups of {[len(s) for s in saved]} parameters, this optimizer of "
            f"{[len(o) for o in ours]}: build it with the same groups before loading"
        )
    pairs = []
    for key, p in zip(chain(*saved), chain(*ours), strict=True):
        buffer = state_dict["state"].get(key, {}).get(BUFFER)
        if buffer is None:
            continue
        if buffer.shape != p.shape:
            raise ValueError(
                f"saved momentum {key} has shape {tuple(buffer.shape)}, its parameter {tuple(p.shape)}: "
                f"the parameters are in another order or belong to another model"
            )
        pairs.append((p, buffer))
    return pairs
