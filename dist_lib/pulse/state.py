"""States seen as bits: names, dtypes, shapes and machine words, with a digest for each tensor and one for all.

A *state* is a mapping of names to dense tensors, such as a ``state_dict``. Everything here is blind to values: a cell
is a word of 1, 2, 4 or 8 bytes. Two states are equal when names, dtypes, shapes and bytes are; whether tensors share
storage (tied weights) is found here too, but is no part of a digest.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse.errors import StateError

State = Mapping[str, Tensor]
T = TypeVar("T")
R = TypeVar("R")

# Codes of the binary format: never change or reuse a number.
_NAMES: Mapping[int, str] = {
    1: "bool", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "uint32", 7: "int32", 8: "uint64", 9: "int64",
    16: "float16", 17: "bfloat16", 18: "float32", 19: "float64", 20: "complex64", 21: "complex128", 22: "complex32",
    32: "float8_e4m3fn", 33: "float8_e5m2", 34: "float8_e4m3fnuz", 35: "float8_e5m2fnuz", 36: "float8_e8m0fnu",
    37: "float4_e2m1fn_x2",
}  # fmt: skip
DTYPES: Mapping[int, torch.dtype] = {c: getattr(torch, n) for c, n in _NAMES.items() if hasattr(torch, n)}
CODES: Mapping[torch.dtype, int] = {d: c for c, d in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is without its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements, exact beyond 2^63."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes of a cell, which is an element, or at most 8 of its bytes (complex128 is two cells)."""
        return min(self.dtype.itemsize, 8)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.nbytes // self.width


@dataclass(frozen=True)
class StateDigest:
    """SHA-256 of a state and of each of its tensors.

    Attributes:
        whole: 32 bytes over every name, dtype, shape and tensor digest, in order of name.
        tensors: 32 bytes for each name.
    """

    whole: bytes
    tensors: Mapping[str, bytes]

    @property
    def hex(self) -> str:
        """The whole digest in hexadecimal."""
        return self.whole.hex()


def default_workers() -> int:
    """Threads used where none are asked for: two, or the one core there is."""
    return min(2, os.cpu_count() or 1)


def in_threads(fn: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> list[R]:
    """``[fn(item) for item in items]`` with ``workers`` threads (None: :func:`default_workers`), in order.

    The calling thread is one of them; each takes the next item as soon as it is free. What ``fn`` raises ends all, and
    of several errors the one of the first item is raised.
    """
    count = default_workers() if workers is None else workers
    work = list(items)
    if count <= 1 or len(work) <= 1:
        return [fn(item) for item in work]
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    indices = itertools.count()  # taking the next one is atomic

    def take() -> None:
        for index in indices:
            if index >= len(work) or errors:
                return
            try:
                results[index] = fn(work[index])
            except BaseException as error:
                errors[index] = error

    others = [threading.Thread(target=take, name="pulse", daemon=True) for _ in range(min(count, len(work)) - 1)]
    for thread in others:
        thread.start()
    take()
    for thread in others:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(work))]


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """The spec of a dense tensor.

    Raises:
        StateError: not a tensor, a sparse, quantised or meta tensor, or a dtype without a code in the format.
    """
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise StateError(f"a state maps names to tensors, but {name!r} is a {type(tensor).__name__}")
    if not name.isprintable() or not name:
        raise StateError(f"names are non-empty printable text, not {name!r}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise StateError(f"{name!r} must be a dense tensor with data, not {tensor.layout} on {tensor.device}")
    if tensor.dtype not in CODES:
        raise StateError(f"{name!r} has dtype {tensor.dtype}; known are {sorted(map(str, CODES))}")
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def as_bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a dense tensor, 1-D uint8, in C order; shares memory with a contiguous CPU tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def as_words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The cells of a dense tensor, 1-D uint8, uint16, uint32 or uint64; shares memory where it can."""
    data = as_bytes(tensor)
    words = data.view(np.dtype(f"u{min(tensor.dtype.itemsize, 8)}"))
    return words if words.flags.aligned else words.copy()


def from_words(words: np.ndarray[Any, Any], spec: TensorSpec) -> Tensor:
    """A CPU tensor over the same memory as ``words`` (writable, of ``spec.cells`` cells)."""
    if spec.numel == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.from_numpy(words.view(np.uint8)).view(spec.dtype).reshape(spec.shape)


def find_ties(state: State) -> dict[str, str]:
    """Names whose tensor is another's, bytes and layout alike, mapped to the first such name in order of name."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, Tensor) or tensor.numel() == 0 or tensor.layout is not torch.strided:
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())
        owner = first.setdefault(key, name)
        if owner != name:
            ties[name] = owner
    return ties


def tensor_digest(spec: TensorSpec, data: np.ndarray[Any, Any]) -> bytes:
    """SHA-256 over dtype, shape and bytes of one tensor."""
    digest = hashlib.sha256(f"{CODES[spec.dtype]}:{','.join(map(str, spec.shape))}:".encode())
    raw: Any = data.view(np.uint8)
    digest.update(raw)
    return digest.digest()


def whole_digest(specs: Mapping[str, TensorSpec], tensors: Mapping[str, bytes]) -> bytes:
    """SHA-256 over names, dtypes, shapes and tensor digests in order of name; lengths keep them apart."""
    digest = hashlib.sha256(f"pulse-state-1:{len(tensors)}:".encode())
    for name in sorted(tensors):
        raw, spec = name.encode(), specs[name]
        shape = ",".join(map(str, spec.shape))
        digest.update(f"{len(raw)}:".encode() + raw + f":{CODES[spec.dtype]}:{shape}:".encode() + tensors[name])
    return digest.digest()


def digest_state(state: State, *, workers: int | None = None) -> StateDigest:
    """Digest a state; tied tensors are read once.

    Raises:
        StateError: see ``spec_of``.
    """
    specs = {name: spec_of(name, tensor) for name, tensor in state.items()}
    ties = find_ties(state)
    owners = [name for name in specs if name not in ties]
    found = dict(
        zip(
            owners,
            in_threads(lambda name: tensor_digest(specs[name], as_bytes(state[name])), owners, workers),
            strict=True,
        )
    )
    tensors = {name: found[ties.get(name, name)] for name in sorted(specs)}
    return StateDigest(whole_digest(specs, tensors), tensors)
