"""What a lab is, and what it is given: configuration from TOML, a run context, saved state.

A lab is a frozen dataclass of settings and one function ``run(config, context) -> metrics``. A scale is a TOML file
with a value for each setting and a ``[run]`` table; there is no second script for a larger machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import time
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dist_lib.comm import DistContext

ROOT = Path(__file__).resolve().parent
SCALES = ("toy", "ranks", "gpu", "cluster")
STATE = "state.pt"


class LabError(ValueError):
    """A mistake of the caller: a name, a setting or a file. The message says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The ``[run]`` table of a scale.

    Attributes:
        world_size: processes.
        minutes: what to expect on the hardware of the scale.
        memory_gib: memory that it needs, of the machine or of each GPU.
        disk_mib: disk that a run fills.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        timeout_minutes: when a run of several processes on one machine is ended.
    """

    world_size: int = 1
    minutes: float = 1.0
    memory_gib: float = 1.0
    disk_mib: float = 10.0
    device: str = "auto"
    timeout_minutes: float = 30.0


@dataclass(frozen=True)
class Lab:
    """One lab.

    Attributes:
        name: its folder.
        title: one line.
        config: a frozen dataclass; every field is a setting.
        run: ``run(config, context) -> metrics``; called on every rank, the metrics of rank 0 count.
        figures: turns a finished run's history and metrics into plotly figures for the report.
    """

    name: str
    title: str
    config: type[Any]
    run: Callable[[Any, RunContext], dict[str, Any]]
    figures: Callable[[Any], Sequence[Any]] | None = None


@dataclass
class RunContext:
    """What a running lab may use.

    Attributes:
        dist: rank, world size, device, group.
        seed: of this run.
        directory: for state; shared by all ranks of one machine.
        resumed: whether saved state should be used.
        on_step: receives each logged step on rank 0.
        history: logged steps.
        timings: seconds by name, see :meth:`timed`.
    """

    dist: DistContext
    seed: int
    directory: Path
    resumed: bool = False
    on_step: Callable[[dict[str, Any]], None] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.dist.device

    def log_step(self, step: int, total: int, **metrics: float) -> None:
        """Log numbers of a step; ``total`` is the number of steps of the run. Only rank 0 keeps them."""
        if self.dist.is_main:
            row = {"step": step, **{k: float(v) for k, v in metrics.items()}}
            self.history.append(row)
            if self.on_step is not None:
                self.on_step({**row, "total": total})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall time of a block to ``timings[name]``, after the device has finished."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - begin

    def _state_path(self) -> Path:
        return self.directory / (STATE if self.dist.rank == 0 else f"state-{self.dist.rank}.pt")

    def save_state(self, state: Mapping[str, Any], *, every_rank: bool = False) -> None:
        """Save what :meth:`load_state` returns after a restart, whole or not at all (rank 0, or ``every_rank``)."""
        if not (self.dist.is_main or every_rank):
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._state_path()
        temporary = path.with_suffix(".tmp")
        torch.save({"state": dict(state), "history": self.history}, temporary)
        os.replace(temporary, path)

    def load_state(self, *, every_rank: bool = False) -> dict[str, Any] | None:
        """The saved state if this run resumes one, else None. All ranks read rank 0's unless ``every_rank``.

        Raises:
            LabError: a run to resume without a readable state.
        """
        if not self.resumed:
            return None
        path = self._state_path() if every_rank else self.directory / STATE
        if not path.exists():
            raise LabError(f"nothing to resume: {path} does not exist (the run had not saved anything yet)")
        try:
            saved = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise LabError(f"{path} cannot be read ({error}); start the run anew without --resume") from error
        if self.dist.is_main:
            self.history[:] = saved["history"]
        state: dict[str, Any] = saved["state"]
        return state


def lab_names() -> list[str]:
    """Names of all labs, in alphabetical order."""
    return sorted(p.parent.name for p in ROOT.glob("*/run.py"))


def find_lab(name: str) -> Lab:
    """Import a lab by name.

    Raises:
        LabError: listing the labs that exist.
    """
    if name not in lab_names():
        raise LabError(f"there is no lab {name!r}{_close(name, lab_names())}; there are {', '.join(lab_names())}")
    lab: Lab = importlib.import_module(f"labs.{name}.run").LAB
    return lab


def _close(given: str, allowed: Sequence[str]) -> str:
    matches = difflib.get_close_matches(given, allowed, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _checked(owner: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Build a dataclass from plain values; wrong names, types and missing entries are named."""
    hints = typing.get_type_hints(owner)
    fields = {f.name: f for f in dataclasses.fields(owner)}
    for key, value in values.items():
        if key not in fields:
            raise LabError(f"{where}: no setting {key!r}{_close(key, list(fields))}; there are {', '.join(fields)}")
        expected = hints[key]
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        origin = typing.get_origin(expected) or expected
        fits = isinstance(value, list) if origin is tuple else isinstance(value, origin)
        if not fits or (isinstance(value, bool) and expected is not bool):
            kind = getattr(expected, "__name__", str(expected))
            raise LabError(f"{where}: {key} = {value!r} is a {type(value).__name__}; it must be a {kind}")
    missing = [n for n, f in fields.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise LabError(f"{where}: no value for {', '.join(missing)}")
    plain = {k: tuple(v) if isinstance(v, list) else float(v) if hints[k] is float else v for k, v in values.items()}
    try:
        return owner(**plain)
    except ValueError as error:
        raise LabError(f"{where}: {error}") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """``key=value`` as on the command line; the value is TOML (``3``, ``1e-3``, ``true``, ``[1, 2]``) or plain text.

    Raises:
        LabError: no ``=``.
    """
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise LabError(f"--set {text!r}: write it as key=value, for instance --set steps=10")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip(), value


def load_scale(lab: Lab, scale: str, overrides: Sequence[str] = ()) -> tuple[Any, RunSettings]:
    """Read ``labs/<lab>/configs/<scale>.toml`` (or a TOML file given by its path) with ``key=value`` overrides.

    Raises:
        LabError: an unknown scale or setting, a value of another type or out of range.
    """
    path = Path(scale) if scale.endswith(".toml") else ROOT / lab.name / "configs" / f"{scale}.toml"
    if not path.exists():
        raise LabError(f"lab {lab.name!r} has no scale {scale!r}; there are {', '.join(SCALES)}, or give a .toml file")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"{path} is not valid TOML: {error}") from error
    run = data.pop("run", {})
    where = f"labs/{lab.name}/configs/{path.name}"
    for text in overrides:
        key, value = parse_setting(text)
        target = run if key.startswith("run.") else data
        target[key.removeprefix("run.")] = value
        where = f"{path.name} with --set"
    return _checked(lab.config, data, where), _checked(RunSettings, run, f"{where}, [run]")
