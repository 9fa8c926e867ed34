"""Stop a pipeline after a drain, and go on later with the same bits.

What a stage needs beyond its modules: the weights at versions g and g - 1, the optimizer's state (with the previous
update, if it corrects), the number of updates g, which is also the position in the data, the scheduler and the random
states. Versions follow the number of the batch and not time, so that a drain costs a bubble and changes no result.

On disk a checkpoint is a directory ``step-00000012`` with one file a rank. Its name appears when all files are whole:
a run that dies while it saves leaves the one before. Files load with ``weights_only=True``; no code is in them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dist_lib.comm import agree, collectives

if TYPE_CHECKING:
    from dist_lib.async_pipeline.runtime import Pipeline

FORMAT = 1
_MUST_MATCH = ("micro_batches", "delay", "clip_norm", "error_feedback", "ef_strength", "ef_dtype")


def _config(pipeline: Pipeline) -> dict[str, Any]:
    values = {key: value for key, value in asdict(pipeline.config).items() if key in _MUST_MATCH}
    return {**values, "ef_dtype": str(values["ef_dtype"]), "replicas": pipeline.mesh.replicas}


def stage_state(pipeline: Pipeline) -> dict[str, Any]:
    """All that the next batch of this stage depends on, copied; loads with ``torch.load(weights_only=True)``.

    Returns:
        ``format``, ``stage``, ``stages``, ``config``, ``versions`` (number of updates, weights newest first),
        ``buffers``, ``optimizer``, ``scheduler``, ``rng`` (CPU and, on a GPU, its own).
    """
    device = pipeline.mesh.device
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    state = {
        "format": FORMAT,
        "stage": pipeline.mesh.stage,
        "stages": pipeline.mesh.stages,
        "config": _config(pipeline),
        "versions": pipeline.versions.state_dict(),
        "buffers": {name: buffer.detach().clone() for name, buffer in pipeline.module.named_buffers()},
        "optimizer": None if pipeline.optimizer is None else pipeline.optimizer.state_dict(),
        "scheduler": None if pipeline.scheduler is None else pipeline.scheduler.state_dict(),
        "rng": rng,
    }
    copied: dict[str, Any] = _copied(state)
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def _check(pipeline: Pipeline, state: Mapping[str, Any]) -> None:
    if state.get("format") != FORMAT:
        raise ValueError(f"the checkpoint has format {state.get('format')!r}; this version reads {FORMAT}")
    place, here = (state["stage"], state["stages"]), (pipeline.mesh.stage, pipeline.mesh.stages)
    if place != here:
        raise ValueError(
            f"the checkpoint is of stage {place[0]} of {place[1]}; this rank is stage {here[0]} of {here[1]}"
        )
    mine, theirs = _config(pipeline), state["config"]
    wrong = [f"{key} was {theirs.get(key)}, is {mine[key]}" for key in mine if mine[key] != theirs.get(key)]
    if wrong:
        raise ValueError(f"the checkpoint belongs to another configuration: {'; '.join(wrong)}")
    for name, part in (("optimizer", pipeline.optimizer), ("scheduler", pipeline.scheduler)):
        if (state[name] is None) != (part is None):
            raise ValueError(f"the checkpoint has {'no' if state[name] is None else 'a'} {name}, unlike this pipeline")
    buffers = dict(pipeline.module.named_buffers())
    if buffers.keys() != state["buffers"].keys():
        raise ValueError(f"the checkpoint has buffers {sorted(state['buffers'])}; this stage {sorted(buffers)}")


@torch.no_grad()
def load_stage_state(pipeline: Pipeline, state: Mapping[str, Any]) -> None:
    """Go on from what :func:`stage_state` gave; the data must go on at batch ``pipeline.step``.

    Raises:
        ValueError: it belongs to another stage, configuration or model.
    """
    _check(pipeline, state)
    pipeline.versions.load_state_dict(state["versions"])
    pipeline.step = pipeline.versions.newest
    for name, buffer in pipeline.module.named_buffers():
        buffer.copy_(state["buffers"][name])
    if pipeline.optimizer is not None:
        pipeline.optimizer.load_state_dict(_copied(state["optimizer"]))
    if pipeline.scheduler is not None:
        pipeline.scheduler.load_state_dict(_copied(state["scheduler"]))
    torch.set_rng_state(state["rng"]["cpu"].cpu())
    if "cuda" in state["rng"] and pipeline.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), pipeline.mesh.device)


def _file(pipeline: Pipeline) -> str:
    return f"stage-{pipeline.mesh.stage}-replica-{pipeline.mesh.replica}.pt"


def save_checkpoint(pipeline: Pipeline, directory: str | Path, *, keep: int = 2) -> Path:
    """Write a checkpoint between two runs; call it on all ranks.

    Args:
        pipeline: drained, as after :meth:`~dist_lib.async_pipeline.Pipeline.run`.
        directory: of all checkpoints of this run, seen by all ranks (a shared file system on several machines).
        keep: number of newest checkpoints to leave there, at least 1.

    Returns:
        The directory of this checkpoint.

    Raises:
        OSError, ValueError: on the rank that could not write, or for a ``keep`` below 1.
        PipelineError: on the other ranks. The checkpoints that were there are untouched.
    """
    mesh, root = pipeline.mesh, Path(directory)
    target = root / f"step-{pipeline.step:08d}"
    partial = target.with_suffix(".partial")
    problem: Exception | None = None
    try:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the checkpoint that is being written must stay")
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / _file(pipeline)).open("wb") as file:
            torch.save(stage_state(pipeline), file)
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        problem = error
    mesh.settle(problem)
    try:
        if mesh.stage == 0 and mesh.replica == 0:
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            for old in _steps(root)[:-keep]:
                shutil.rmtree(old)
    except OSError as error:
        problem = error
    mesh.settle(problem)
    return target


def _steps(root: Path) -> list[Path]:
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_checkpoint(pipeline: Pipeline, directory: str | Path) -> int:
    """Load the newest whole checkpoint of a directory; call it on all ranks.

    Returns:
        How many batches are done, which is the batch to go on with; 0, and nothing changed, if there is no checkpoint.

    Raises:
        AgreementError: the ranks see different checkpoints, so the directory is not shared.
        ValueError, OSError: a checkpoint that does not fit or cannot be read, on the rank concerned.
        PipelineError: on the other ranks.
    """
    steps = _steps(Path(directory))
    agree([path.name for path in steps[-1:]], what="the newest checkpoint", group=pipeline.mesh.world)
    if not steps:
        return 0
    problem: Exception | None = None
    try:
        path = steps[-1] / _file(pipeline)
        state = torch.load(path, map_location=pipeline.mesh.device, weights_only=True)
        _check(pipeline, state)
    except Exception as error:
        problem = error
    pipeline.mesh.settle(problem)
    try:
        load_stage_state(pipeline, state)
    except Exception as error:
        problem = error
    pipeline.mesh.settle(problem)
    collectives.barrier(group=pipeline.mesh.world)
    return pipeline.step
