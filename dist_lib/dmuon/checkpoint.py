"""Checkpoints by name, through ``torch.distributed.checkpoint``: any number of ranks may read what others wrote.

A matrix and its momentum are written by their owner and read by whoever owns them next; the other parameters are
written in chunks and cut anew. A checkpoint is written into a hidden folder that gets its name only when it is
complete: a process that is killed while saving leaves the last good one as it was.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_lib.comm import agree
from dist_lib.dmuon.optimizer import ADAMW_KEYS, MUON_KEYS, DMuon
from dist_lib.dmuon.runtime import Runtime
from dist_lib.optim.conversion import BUFFER

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{10})")
_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


def step_folder(root: str | Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return Path(root) / f"step-{step:010d}"


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest complete checkpoint below ``root``; None if there is none."""
    folders = [p for p in Path(root).glob("step-*") if _NAME.fullmatch(p.name) and (p / ".metadata").exists()]
    return max(folders, default=None)


def _mesh(runtime: Runtime) -> DeviceMesh:
    if runtime.group is None:
        return init_device_mesh(runtime.device.type, (runtime.world_size,))
    return DeviceMesh.from_group(runtime.group, runtime.device.type)


def _spread(local: Tensor, numel: int, mesh: DeviceMesh) -> Tensor:
    """A chunk as the part of a 1-D tensor over all ranks."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,))


def _described(optimizer: DMuon, step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    groups = {}
    for group in optimizer.param_groups:
        keys = MUON_KEYS if group["name"].endswith("muon") else ADAMW_KEYS
        options = {k: float(group[k]) if isinstance(group[k], Tensor) else group[k] for k in keys}
        groups[group["name"]] = {"options": options, "names": group["names"]}
    base = {"format": _FORMAT, "mode": optimizer.runtime.mode, "step": step, "groups": groups}
    return {**base, "skipped_steps": optimizer.skipped_steps, "extra": dict(extra or {})}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the state, by name."""
    kept = set()
    for prefix, module in model.named_modules():
        lost = module._non_persistent_buffers_set
        kept |= {f"{prefix}.{n}" if prefix else n for n in module._buffers if n not in lost}
    return {n: b for n, b in model.named_buffers() if n in kept}


class _Entries:
    """Every tensor of the state that this rank has a part in, by key: the same for writing and for reading."""

    def __init__(self, runtime: Runtime, optimizer: DMuon) -> None:
        self.runtime, self.optimizer, self.mesh = runtime, optimizer, _mesh(runtime)

    def weights(self) -> dict[str, Tensor]:
        runtime = self.runtime
        out: dict[str, Tensor] = {f"model.{n}": m.detach() for n, m in runtime.masters.items()}
        for name, shard in runtime.rest.shards.items():
            out[f"model.{name}"] = self._whole(name, shard.detach())
        return out

    def others(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers; equal on all ranks, or rank 0's count."""
        runtime, trained = self.runtime, set(self.runtime.parameters)
        out = {f"frozen.{n}": p.detach() for n, p in runtime.model.named_parameters() if n not in trained}
        return out | {f"buffer.{n}": b for n, b in _buffers(runtime.model).items()}

    def _whole(self, name: str, local: Tensor) -> Tensor:
        if hasattr(local, "placements"):
            return local
        return _spread(local, self.runtime.rest.parameters[name].numel(), self.mesh)

    def momentum(self) -> dict[str, Tensor]:
        muon, out = self.optimizer.muon, {}
        for name, master in self.runtime.masters.items():
            if muon is not None and BUFFER in muon.state[master]:
                out[f"momentum.{name}"] = muon.state[master][BUFFER]
        return out

    def moments(self) -> dict[str, Tensor]:
        adamw, out = self.optimizer.adamw, {}
        for name, shard in self.runtime.rest.shards.items():
            state = {} if adamw is None else adamw.state.get(shard, {})
            if state:
                out[f"adamw.step.{name}"] = state["step"]
                out |= {f"adamw.{key}.{name}": self._whole(name, state[key]) for key in _MOMENTS}
        return out


@torch.no_grad()
def save_checkpoint(
    root: str | Path,
    runtime: Runtime,
    optimizer: DMuon,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write weights, momentum, moments, options and buffers; return the folder. Collective.

    Args:
        root: folder of all checkpoints, the same (shared) one on all ranks.
        step: number of the checkpoint.
        extra: JSON-able, the same on all ranks, such as the position in the data.
        keep: number of checkpoints that stay; older ones are removed; 0 keeps all.

    Raises:
        FileExistsError: a checkpoint of this step is there.
        RuntimeError: gradients are on their way.
        TypeError: ``extra`` that JSON cannot hold.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    folder, group = step_folder(root, step), runtime.group
    if runtime.reduction.begun or runtime.reduction.gradients:
        raise RuntimeError("save between steps: call step() and zero_grad() before")
    runtime.drain()
    described = _described(optimizer, step, extra)
    text = json.dumps(described, separators=(",", ":")).encode()
    agree([text.decode(), str(folder), folder.exists()], what="what is saved", group=group)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; remove it or save under another step")
    hidden = folder.with_name(f".saving-{folder.name}")
    if runtime.rank == 0:
        shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed
        hidden.mkdir(parents=True)
    dist.barrier(group=group)
    entries = _Entries(runtime, optimizer)
    state = entries.weights() | entries.momentum() | entries.moments()
    sharded = {k: v for k, v in entries.others().items() if hasattr(v, "placements") or runtime.rank == 0}
    state |= sharded | {"described": torch.tensor(list(text), dtype=torch.uint8)}
    save(state, checkpoint_id=str(hidden), process_group=group)
    dist.barrier(group=group)
    if runtime.rank == 0:
        hidden.rename(folder)
        _prune(Path(root), keep)
    dist.barrier(group=group)
    return folder


def _prune(root: Path, keep: int) -> None:
    folders = sorted(p for p in root.glob("step-*") if _NAME.fullmatch(p.name))
    for old in folders[:-keep] if keep else []:
        shutil.rmtree(old, ignore_errors=True)
        logger.info("removed the old checkpoint %s", old)


@torch.no_grad()
def load_checkpoint(path: str | Path, runtime: Runtime, optimizer: DMuon) -> tuple[int, dict[str, Any]]:
    """Read what any number of ranks with any owner map wrote in the same mode; return step and ``extra``. Collective.

    Args:
        path: a checkpoint's folder, or the folder of all checkpoints, of which the newest complete one is taken.
        runtime, optimizer: as for a new run of the same model, with the same groups; options come from the checkpoint.

    Raises:
        FileNotFoundError: no complete checkpoint.
        ValueError: of another model, mode or format; nothing has changed.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = Path(path) if (Path(path) / ".metadata").exists() else latest_checkpoint(path)
    agree(str(folder), what="the checkpoint to load", group=runtime.group)
    if folder is None:
        raise FileNotFoundError(f"there is no complete checkpoint in {path}")
    stored: Mapping[str, Any] = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    if "described" not in stored:
        raise ValueError(f"{folder} was not written by save_checkpoint")
    text = {"described": torch.empty(stored["described"].size, dtype=torch.uint8)}
    load(text, checkpoint_id=str(folder), process_group=runtime.group)
    described = json.loads(bytes(text["described"].tolist()))
    entries = _Entries(runtime, optimizer)
    _check(described, entries, stored, folder)
    runtime.drain()
    runtime.clear_gradients()
    state: dict[str, Any] = {k: torch.empty_like(v) for k, v in (entries.weights() | entries.others()).items()}
    state |= _empty_state(entries, stored)
    load(state, checkpoint_id=str(folder), process_group=runtime.group)
    for key, target in (entries.weights() | entries.others()).items():
        _local(target).copy_(_local(state[key]))
    _restore(entries, state, described)
    for name, master in runtime.masters.items():
        if runtime.matrices[name] is not master and runtime.matrices[name].untyped_storage().nbytes():
            runtime.matrices[name].copy_(master)
    runtime.publish()
    runtime.drain()
    return int(described["step"]), described["extra"]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _check(described: dict[str, Any], entries: _Entries, stored: Mapping[str, Any], folder: Path) -> None:
    runtime = entries.runtime
    if described["format"] != _FORMAT or described["mode"] != runtime.mode:
        raise ValueError(
            f"{folder} has format {described['format']} and mode {described['mode']!r}; this run has {_FORMAT} and "
            f"{runtime.mode!r}: exchange weights between modes with model_state_dict / load_model_state_dict"
        )
    ours = {g["name"]: g["names"] for g in entries.optimizer.param_groups}
    theirs = {name: g["names"] for name, g in described["groups"].items()}
    if ours != theirs:
        raise ValueError(f"{folder} has groups {list(theirs)}, this optimizer {list(ours)}, or other members in them")
    shapes = {f"model.{n}": tuple(p.shape) for n, p in runtime.parameters.items()}
    for name, p in runtime.rest.parameters.items():
        if runtime.mode == "ddp":
            shapes[f"model.{name}"] = (p.numel(),)
    shapes |= {k: tuple(v.shape) for k, v in entries.others().items()}
    wrong = [k for k, shape in shapes.items() if k not in stored or tuple(stored[k].size) != shape]
    if wrong:
        raise ValueError(f"{folder} is of another model: {', '.join(wrong[:5])} is missing or has another shape")


def _empty_state(entries: _Entries, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    runtime, out = entries.runtime, {}
    for name, master in runtime.masters.items():
        if f"momentum.{name}" in stored:
            dtype = stored[f"momentum.{name}"].properties.dtype
            out[f"momentum.{name}"] = torch.empty(master.shape, dtype=dtype, device=master.device)
    for name, shard in runtime.rest.shards.items():
        if f"adamw.step.{name}" in stored:
            out[f"adamw.step.{name}"] = torch.zeros(())
            for key in _MOMENTS:
                out[f"adamw.{key}.{name}"] = entries._whole(name, torch.zeros_like(shard.detach()))
    return out


def _restore(entries: _Entries, state: Mapping[str, Tensor], described: dict[str, Any]) -> None:
    runtime, optimizer = entries.runtime, entries.optimizer
    if optimizer.muon is not None:
        optimizer.muon.state.clear()
        for name, master in runtime.masters.items():
            if f"momentum.{name}" in state:
                optimizer.muon.state[master][BUFFER] = state[f"momentum.{name}"]
    if optimizer.adamw is not None:
        optimizer.adamw.state.clear()
        for name, shard in runtime.rest.shards.items():
            if f"adamw.step.{name}" in state:
                moments = {key: state[f"adamw.{key}.{name}"] for key in _MOMENTS}
                if not hasattr(shard, "placements"):
                    moments = {key: _local(value) for key, value in moments.items()}
                optimizer.adamw.state[shard] = {"step": state[f"adamw.step.{name}"], **moments}
    optimizer.skipped_steps = int(described["skipped_steps"])
    for group in optimizer.param_groups:
        for key, value in described["groups"][group["name"]]["options"].items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


@torch.no_grad()
def model_state_dict(runtime: Runtime) -> dict[str, Tensor]:
    """Whole tensors of the model by name, copies on the CPU, on every rank. Collective.

    A name that is tied to another appears too, as in ``Module.state_dict``.
    """
    from dist_lib.dmuon.fsdp import DMuonFSDP

    if not isinstance(runtime, DMuonFSDP):
        return {n: t.detach().cpu().clone() for n, t in runtime.model.state_dict().items()}
    out = {}
    with runtime.whole():
        for name, value in runtime.model.state_dict(keep_vars=True).items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            out[name] = full.detach().cpu().clone()
    return out


@torch.no_grad()
def load_model_state_dict(runtime: Runtime, state: Mapping[str, Tensor]) -> None:
    """Set the weights, and float32 masters, from whole tensors on every rank; optimizer state stays. Collective.

    Raises:
        ValueError: missing names or other shapes; nothing has changed.
    """
    from torch.distributed.tensor import distribute_tensor

    runtime.drain()
    named: dict[str, Any] = {**dict(runtime.model.named_parameters()), **_buffers(runtime.model)}
    wrong = [n for n, t in named.items() if n not in state or state[n].shape != t.shape]
    if wrong:
        raise ValueError(f"these are missing or have another shape: {', '.join(wrong[:5])}")
    for name, target in named.items():
        value = state[name].to(runtime.device)
        if hasattr(target, "placements"):
            whole: Any = distribute_tensor(value.to(target.dtype), target.device_mesh, target.placements)
            target.to_local().copy_(whole.to_local())
        elif target.untyped_storage().nbytes():
            target.copy_(value)
        if name in runtime.masters:
            runtime.masters[name].copy_(value)
    runtime.rest.adopt({n: state[n] for n in runtime.rest.parameters})
    runtime.drain()
