"""Agree first, then communicate: a plan is compared across ranks before anybody acts on it.

A disagreement that is found here raises on *every* rank with the ranks that differ; found later it would be a hang.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from dist_lib.comm.collectives import all_gather

_REFUSED = "0" * 64  # in place of a fingerprint: this rank's value has none


class AgreementError(RuntimeError):
    """Ranks hold different values of something that must be equal. ``ranks`` are those outside the majority."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [[_plain(k), _plain(v)] for k, v in value.items()]  # order is part of a plan
    if isinstance(value, (list, tuple, torch.Size)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(v)) for v in value)
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    raise TypeError(
        f"cannot agree on a {type(value).__name__}: use dataclasses, dicts, lists, numbers, strings or tensors"
    )


def fingerprint(value: Any) -> str:
    """SHA-256 of a canonical form of ``value``; equal values have equal fingerprints in every process.

    Raises:
        TypeError: something without a canonical form, such as a function.
    """
    return hashlib.sha256(json.dumps(_plain(value), separators=(",", ":")).encode()).hexdigest()


def agree(value: Any, *, what: str, group: dist.ProcessGroup | None = None) -> str:
    """Raise on every rank unless all ranks of ``group`` hold an equal ``value``; return its fingerprint.

    Args:
        value: nested dataclasses, dicts, lists, numbers, strings, dtypes, tensors.
        what: its name in the error, such as ``"the owner plan"``.
        group: default: all ranks.

    Raises:
        AgreementError: on all ranks alike, naming the ranks that differ from the majority.
        TypeError: on a rank whose value :func:`fingerprint` refuses; the others, told so, raise AgreementError.
    """
    refusal: TypeError | None = None
    try:
        mine = fingerprint(value)
    except TypeError as error:  # say so to the others first, who wait
        mine, refusal = _REFUSED, error
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    row = torch.tensor(list(bytes.fromhex(mine)), dtype=torch.uint8, device=device)
    prints = [bytes(r.tolist()).hex() for r in all_gather(row, group=group)]
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if refusal is not None:
        raise refusal
    if _REFUSED in prints:
        bad = [ranks[i] for i, p in enumerate(prints) if p == _REFUSED]
        raise AgreementError(f"ranks {bad} of {len(prints)} hold a value of {what} that has no canonical form", bad)
    if len(set(prints)) > 1:
        majority = Counter(prints).most_common(1)[0][0]
        differ = [ranks[i] for i, p in enumerate(prints) if p != majority]
        raise AgreementError(
            f"ranks {differ} of {len(prints)} hold another value of {what} than the rest "
            f"(this rank: {mine[:12]}, most: {majority[:12]}); build it from the same configuration on every rank",
            differ,
        )
    return mine
