"""What a matrix's orthogonal update is multiplied by, and the options of Muon with their validation.

An orthogonal matrix has singular values of one, whatever its shape; published versions of Muon multiply it by
different factors of the shape, and a learning rate only makes sense together with that factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SCALES = ("original", "match_rms_adamw", "spectral")
MOMENTUM_FORMS = ("heavy_ball", "ema")
NONFINITE = ("raise", "skip", "propagate")
# Entries of a parameter group that are no options: torch's own, and what its learning-rate schedulers keep there.
BOOKKEEPING = frozenset(
    ["params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"]
)


def update_scale(scale: str, rows: int, cols: int) -> float:
    """The factor of one ``rows x cols`` matrix.

    ``original``: ``sqrt(max(1, rows / cols))`` (Keller Jordan; the default of ``torch.optim.Muon``).
    ``match_rms_adamw``: ``0.2 sqrt(max(rows, cols))``, an update of root mean square 0.2 (Moonlight, DMuon).
    ``spectral``: ``sqrt(rows / cols)``, a change of output per change of input that does not depend on the width.

    Raises:
        ValueError: another name, or an empty matrix.
    """
    if scale not in SCALES:
        raise ValueError(f"scale = {scale!r}; it must be one of {', '.join(SCALES)}")
    if rows < 1 or cols < 1:
        raise ValueError(f"a {rows} x {cols} matrix has no scale; need at least one row and one column")
    if scale == "original":
        return math.sqrt(max(1.0, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols)) if scale == "match_rms_adamw" else math.sqrt(rows / cols)


def per_step_coefficients(coefficients: Any, steps: int) -> Any:
    """Coefficients as Newton-Schulz takes them: a name as it is, one triple repeated, triples as tuples of floats."""
    if isinstance(coefficients, str):
        return coefficients
    values = list(coefficients)
    if len(values) == 3 and all(isinstance(v, (int, float)) for v in values):
        return (tuple(float(v) for v in values),) * steps
    return tuple(tuple(float(v) for v in triple) for triple in values)


def _one_of(group: Mapping[str, Any], key: str, allowed: Sequence[str]) -> None:
    if group[key] not in allowed:
        raise ValueError(f"{key} = {group[key]!r}; it must be one of {', '.join(allowed)}")


def check_options(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse options that are unknown, of the wrong kind or out of range.

    Raises:
        ValueError: naming the option, what was given and what is allowed.
    """
    unknown = set(group) - set(known) - BOOKKEEPING
    if unknown:
        raise ValueError(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"a Tensor lr must have one element; this one has shape {tuple(lr.shape)}")
    for key in ("lr", "weight_decay"):
        if not 0.0 <= float(group[key]) < math.inf:
            raise ValueError(f"{key} = {float(group[key])}; it must be finite and at least 0")
    if not 0.0 <= group["momentum"] < 1.0:
        raise ValueError(f"momentum = {group['momentum']}; it must be at least 0 and below 1")
    if not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
        raise ValueError(f"ns_steps = {group['ns_steps']!r}; it must be an integer of at least 1")
    _one_of(group, "scale", SCALES)
    _one_of(group, "momentum_form", MOMENTUM_FORMS)
    _one_of(group, "nonfinite", NONFINITE)
    sizes = group["split_sizes"]
    if sizes is not None and (not sizes or any(not isinstance(s, int) or s < 1 for s in sizes)):
        raise ValueError(f"split_sizes = {sizes!r}; give the rows of each block as integers of at least 1, or None")


def check_parameter(p: Tensor, group: Mapping[str, Any], name: str) -> None:
    """Refuse a parameter that Muon cannot update as whole matrices.

    Raises:
        TypeError: complex, integer or sparse.
        ValueError: sharded; fewer than 2 dimensions; more than 3 without ``flatten``; rows that ``split_sizes`` misses.
    """
    if p.is_sparse or p.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({p.layout}); Muon needs dense matrices, give it to SparseAdam")
    if not p.is_floating_point():
        raise TypeError(f"{name} has dtype {p.dtype}; Muon needs real floating-point matrices")
    if hasattr(p, "placements"):
        raise ValueError(
            f"{name} is a DTensor: a shard of a matrix must not be orthogonalised on its own; "
            f"use an optimizer that brings each whole matrix to one place"
        )
    if p.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(p.shape)}; Muon takes matrices, stacks (experts, rows, cols), and with "
            f"flatten=True convolution kernels: give vectors and scalars to AdamW (see split_parameters)"
        )
    if p.ndim > 3 and not group["flatten"]:
        raise ValueError(
            f"{name} has shape {tuple(p.shape)}; with flatten=True it becomes a matrix of {p.shape[0]} rows, "
            f"otherwise give it to AdamW"
        )
    rows = p.shape[0] if group["flatten"] else p.shape[-2]
    if group["split_sizes"] is not None and sum(group["split_sizes"]) != rows:
        raise ValueError(
            f"{name} has {rows} rows; split_sizes = {tuple(group['split_sizes'])} sum to {sum(group['split_sizes'])}"
        )
