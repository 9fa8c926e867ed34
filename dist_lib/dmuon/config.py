"""What the runtimes can be told, and what they refuse before training starts.

Options are plain frozen data, so that ranks can compare them. The checks here look at a model as it is handed over;
they change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import Parameter

LayerOf = Callable[[str], str]
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """Data types of the parameters whose names match.

    Attributes:
        pattern: regular expression, searched for in the name.
        param_dtype: of the weight that forward and backward see and that is published; None leaves it.
        reduce_dtype: of the gradient while it is reduced; None is the gradient's own.
    """

    pattern: str
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        for key in ("param_dtype", "reduce_dtype"):
            value = getattr(self, key)
            if value is not None and value not in _FLOATS:
                names = ", ".join(str(d).removeprefix("torch.") for d in _FLOATS)
                raise ValueError(f"{key} = {value}; allowed are {names} and None")


@dataclass(frozen=True)
class RuntimeConfig:
    """Options of a runtime.

    Attributes:
        publish: ``"sync"`` waits for the new weights at the end of the step; ``"async"`` lets every layer wait for its
            own just before it runs.
        precision: for each parameter the first entry that matches counts; none: as the model is.
        master: the owner of a half-precision weight keeps a float32 copy that it updates; otherwise the half-precision
            weight itself is updated, rounded once a step.
        packed: one message for all of an owner's matrices of a layer; otherwise one for each matrix.
        overlap: reduce during backward, a layer as soon as it and all before it are done; otherwise after backward.
        record: keep events from the start.
    """

    publish: Literal["sync", "async"] = "sync"
    precision: tuple[Precision, ...] = ()
    master: bool = True
    packed: bool = True
    overlap: bool = True
    record: bool = False

    def __post_init__(self) -> None:
        if self.publish not in ("sync", "async"):
            raise ValueError(f"publish = {self.publish!r}; it must be 'sync' or 'async'")
        object.__setattr__(self, "precision", tuple(self.precision))
        wrong = [p for p in self.precision if not isinstance(p, Precision)]
        if wrong:
            raise TypeError(f"precision holds {wrong[0]!r}; give Precision(pattern, param_dtype, reduce_dtype)")

    def param_dtype(self, name: str, current: torch.dtype) -> torch.dtype:
        """Data type of the weight of this name."""
        return self._first(name).param_dtype or current

    def reduce_dtype(self, name: str, current: torch.dtype) -> torch.dtype:
        """Data type in which the gradient of this name travels."""
        return self._first(name).reduce_dtype or current

    def _first(self, name: str) -> Precision:
        return next((p for p in self.precision if re.search(p.pattern, name)), Precision(""))


def numbered_layer(name: str) -> str:
    """The layer of a parameter: its name up to the first number, ``layers.3`` of ``layers.3.mlp.up.weight``.

    A name without a number belongs to the whole model, ``""``.
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def whole_model(name: str) -> str:
    """One layer for everything, ``""``: the fewest messages, one an owner, and no overlap with forward or backward.

    For ``publish="sync"`` where a step waits for its communication anyway.
    """
    return ""


def modules_of(model: nn.Module, names: Mapping[int, str], layer_of: LayerOf) -> dict[str, list[nn.Module]]:
    """For each layer the modules whose forward reads its matrices: the layer, and others tied to one of them.

    Args:
        model: the whole model.
        names: ``id`` of a parameter and its name.
        layer_of: layer of a parameter's name.

    Raises:
        ValueError: a layer that is no module of the model, or that does not contain its parameter.
    """
    modules = dict(model.named_modules())
    found: dict[str, list[nn.Module]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in names:
            continue
        layer, place = layer_of(names[id(p)]), layer_of(name)
        if place not in modules or (place and not name.startswith(place + ".")):
            raise ValueError(
                f"layer_of({name!r}) is {place!r}, which is no module that contains it; return the name of a module on "
                f"the way to the parameter, or '' for the whole model"
            )
        module = modules[place]
        if all(module is not known for known in found.setdefault(layer, [])):
            found[layer].append(module)
    return found


def check_model(model: nn.Module, *, sharded: bool) -> None:
    """Refuse what a runtime cannot train.

    Args:
        model: as the user hands it over.
        sharded: whether the runtime shards it with FSDP2 itself.

    Raises:
        TypeError: a wrapped or compiled model.
        ValueError: parameters on the meta device or on several devices, sparse gradients, complex or sharded
            parameters, lazy ones, or nothing to train.
    """
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel) or kind == "FullyShardedDataParallel":
        raise TypeError(
            f"the model is wrapped in {kind} already; hand over the plain module: the runtime reduces itself"
        )
    if kind == "OptimizedModule" or any(type(m).__name__ == "OptimizedModule" for m in model.modules()):
        raise TypeError(
            "the model is compiled with torch.compile; its hooks would be skipped: hand over the plain module"
        )
    if any(type(m).__name__.startswith("FSDP") for m in model.modules()):
        advice = "this runtime calls fully_shard itself" if sharded else "use DMuonFSDP on the plain module"
        raise TypeError(f"the model is sharded with fully_shard already; {advice}")
    sparse = [n for n, m in model.named_modules() if getattr(m, "sparse", False) is True]
    if sparse:
        raise ValueError(f"{sparse[0]} makes sparse gradients; build it with sparse=False")
    named = list(model.named_parameters())
    _check_parameters(named)
    if not any(p.requires_grad for _, p in named):
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")


def _check_parameters(named: list[tuple[str, Parameter]]) -> None:
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} is lazy and has no shape yet; run the model once before")
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device; give the weights values first")
        if hasattr(p, "placements"):
            raise ValueError(
                f"{name} is a DTensor; tensor-parallel models are not supported: hand over the plain module"
            )
        if p.requires_grad and p.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {p.dtype}; trained parameters must be real floating-point")
    devices = sorted({str(p.device) for _, p in named})
    if len(devices) > 1:
        raise ValueError(f"parameters lie on {', '.join(devices)}; a rank works on one device")
