"""Safetensors checkpoints, single files or hub folders of several: read as states, written whole or not at all.

A hub folder keeps its other files (configuration, tokenizer) beside the weights; they are copied along. Safetensors
knows no tied weights: tensors that share storage are written out one by one.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from dist_lib.pulse.errors import MissingPackageError, StateError
from dist_lib.pulse.state import State

WEIGHTS = "model.safetensors"


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise MissingPackageError("safetensors", "reading and writing checkpoints") from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint in order of name.

    Raises:
        StateError: there is no such file, or none in the folder.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise StateError(f"there is no checkpoint at {path}: give a .safetensors file or a folder with such files")
    return files


def load_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of a file or a hub folder, on the CPU.

    Raises:
        StateError: no checkpoint, a damaged file, or a name in several files.
    """
    library = _safetensors()
    state: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            found: dict[str, Tensor] = library.load_file(str(file), device="cpu")
        except Exception as error:  # the package raises an error class of its own, and others
            raise StateError(f"{file} cannot be read: {error}") from error
        twice = set(found) & set(state)
        if twice:
            raise StateError(f"{sorted(twice)[:5]} are in several files of {path}")
        state.update(found)
    return state


def _write(state: State, file: Path) -> None:
    seen: set[int] = set()
    tensors = {}
    for name, tensor in state.items():
        at = tensor.untyped_storage().data_ptr()
        own = tensor.contiguous()
        tensors[name] = own.clone() if at in seen and own.numel() else own
        seen.add(at)
    _safetensors().save_file(tensors, str(file), metadata={"format": "pt"})


def save_checkpoint(state: State, path: Path, *, like: Path | None = None) -> None:
    """Write a state to a ``.safetensors`` file, or to a hub folder for any other name.

    A folder is put together beside its place and then swapped in; of two writers one wins, and a crash leaves the old
    one (or, between two renames, its whole copy beside).

    Args:
        state: what to write.
        path: a file that ends in ``.safetensors``, or a folder.
        like: a checkpoint folder whose other files are copied into a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            _write(state, beside)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        return
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        if like is not None and like.is_dir():
            for other in sorted(like.iterdir()):
                if other.is_file() and ".safetensors" not in other.name:
                    shutil.copy2(other, folder / other.name)
        _write(state, folder / WEIGHTS)
        os.chmod(folder, 0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(folder, path)
            shutil.rmtree(old)
        else:
            os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
