"""A trainer and a sampler as two processes that know of each other through a store only.

The trainer publishes version ``t`` of the weights after ``t`` steps. The sampler answers the problems of step ``t``
with version ``max(0, t - staleness)`` and puts the rollouts into the store; the trainer refuses older ones. So every
batch depends on the seed, its step and a version, and never on which process was faster. Each may be killed at any
time: a version or a batch is there or is not, the trainer's own state is saved before a version becomes visible, and a
run that is started again in the same folder goes on to the same bits.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from dist_lib import results
from dist_lib.models import Decoder
from dist_lib.pulse import (
    CorruptPatchError,
    MissingObjectError,
    Publisher,
    Retry,
    Store,
    Subscriber,
    apply,
    decode,
    diff,
    digest_state,
    encode,
)
from dist_lib.pulse.subscriber import newest_version
from dist_lib.tasks import Addition, GrpoConfig, GrpoTrainer, Rollouts, sample_rollouts, warm_start

T = TypeVar("T")
ROLES = ("trainer", "sampler")


class WorkerDied(RuntimeError):
    """A process of the pair ended before its work was done; says which one and how."""


class RunError(RuntimeError):
    """A run that cannot go on: the folder is another run's, a batch is too old, or the other side does not answer."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """One run of a trainer and a sampler.

    Attributes:
        grpo: how steps are taken.
        steps: how many.
        staleness: versions by which a batch may lag behind the weights it trains, and does.
        sync: ``"patch"`` publishes changes, ``"full"`` every version whole.
        codec: of patches.
        anchor_every: versions from one anchor to the next, with patches.
        digits, d_model, n_layers, d_ff: of the sums and of the model.
        warm_steps: of supervised training before the first version.
        wait_s: after which a process gives up on the other.

    Raises:
        ValueError: a setting out of its range, named with its value.
    """

    grpo: GrpoConfig
    steps: int
    staleness: int = 0
    sync: str = "patch"
    codec: str = "fast"
    anchor_every: int = 10
    digits: int = 1
    d_model: int = 32
    n_layers: int = 1
    d_ff: int = 64
    warm_steps: int = 60
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "staleness": 0, "anchor_every": 1, "warm_steps": 0, "wait_s": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")
        if self.sync not in ("patch", "full"):
            raise ValueError(f"sync = {self.sync!r} must be patch or full")

    @property
    def task(self) -> Addition:
        """The sums."""
        return Addition(self.digits)

    def new_model(self) -> Decoder:
        """The model without any training."""
        shape = self.task.model_config(d_model=self.d_model, n_layers=self.n_layers, d_ff=self.d_ff)
        return Decoder(shape, seed=self.grpo.seed)

    def start_model(self) -> Decoder:
        """The model after supervised training."""
        model = self.new_model()
        if self.warm_steps:
            warm_start(model, self.task, steps=self.warm_steps, lr=5e-3, batch_size=64, seed=self.grpo.seed)
        return model

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def read(text: str) -> PairSettings:
        """The inverse of :meth:`write`."""
        content = json.loads(text)
        grpo = content.pop("grpo")
        return PairSettings(grpo=GrpoConfig(**{**grpo, "betas": tuple(grpo["betas"])}), **content)


def wait_for(look: Callable[[], T | None], what: str, seconds: float) -> T:
    """Look until something is there.

    Raises:
        RunError: there was nothing for so many seconds.
    """
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > end:
            raise RunError(f"no {what} after {seconds:g} s: is the other process running on the same folder?")
        time.sleep(0.01)


def _store(folder: Path, name: str) -> Store:
    return Store(str(folder / name), retry=Retry(attempts=3))


def _ready(step: int) -> str:
    return f"ready/{step:08d}"


def send_rollouts(store: Store, batch: Rollouts) -> None:
    """Put a batch into a store: its bytes under their digest, then a marker that names them.

    Raises:
        dist_lib.pulse.store.ObjectExistsError: there is another batch for this step.
    """
    data = encode(diff(None, batch.to_state(), version=batch.step, workers=1), "fast", workers=1)
    content = {"object": store.put_content(data), "size": len(data)}
    store.put_marker(_ready(batch.step), json.dumps(content).encode())


def receive_rollouts(store: Store, step: int) -> Rollouts | None:
    """The batch of a step, verified; None if it is not there yet.

    Raises:
        CorruptPatchError: what is there is no batch, or one of another step.
    """
    try:
        marker = store.get(_ready(step), 4096)
    except MissingObjectError:
        return None
    try:
        content = json.loads(marker)
        digest, size = str(content["object"]), int(content["size"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptPatchError(f"the marker of the rollouts of step {step} is damaged: {error}") from error
    state = apply(decode(store.get_content(digest, size)), {}, workers=1)
    try:
        batch = Rollouts.from_state(state)
    except ValueError as error:
        raise CorruptPatchError(f"the rollouts of step {step} are damaged: {error}") from error
    if batch.step != step:
        raise CorruptPatchError(f"the rollouts of step {step} are those of step {batch.step}")
    return batch


class Weights:
    """The trainer's end of the weights: publishes versions as patches or whole."""

    def __init__(self, settings: PairSettings, store: Store) -> None:
        self.settings, self.store = settings, store
        self.publisher = Publisher(store, codec=settings.codec, anchor_every=settings.anchor_every, workers=1)

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Publish the state that follows the newest version."""
        if self.settings.sync == "patch":
            self.publisher.publish(state)
            return
        data = encode(diff(None, state, version=version, workers=1), self.settings.codec, workers=1)
        self.publisher.publish_parts(version, None, [self.publisher.stage(data)])


def _save(trainer: GrpoTrainer, history: list[dict[str, Any]], path: Path) -> None:
    beside = path.with_suffix(".part")
    with open(beside, "wb") as file:
        torch.save({"trainer": trainer.state_dict(), "history": history}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def history_of(folder: Path) -> list[dict[str, Any]]:
    """What the trainer did so far, a mapping for each step: loss, reward, digest of the weights after it and more."""
    path = folder / "trainer.pt"
    if not path.exists():
        return []
    found: list[dict[str, Any]] = torch.load(path, weights_only=True)["history"]
    return found


def run_trainer(settings: PairSettings, folder: Path) -> None:
    """The trainer's process: goes on where the folder's run is.

    Raises:
        RunError: the sampler does not answer, a batch is too old, or versions are there without the trainer's state.
    """
    saved, store, inbox = folder / "trainer.pt", _store(folder, "weights"), _store(folder, "rollouts")
    newest = newest_version(store, listed=True)
    history: list[dict[str, Any]] = []
    if saved.exists():
        trainer = GrpoTrainer(settings.new_model(), settings.task, settings.grpo)
        content = torch.load(saved, weights_only=True)
        trainer.load_state_dict(content["trainer"])
        history = content["history"]
    elif newest is None:
        trainer = GrpoTrainer(settings.start_model(), settings.task, settings.grpo)
        _save(trainer, history, saved)
    else:
        raise RunError(f"version {newest} is published in {folder}, but the trainer's state is gone; use a new folder")
    if newest is not None and newest > trainer.steps:
        raise RunError(f"version {newest} is published in {folder}, but the trainer's state is of {trainer.steps}")
    weights = Weights(settings, store)
    if newest is None or newest < trainer.steps:
        weights.publish(trainer.weights(), trainer.steps)
    while trainer.steps < settings.steps:
        step = trainer.steps
        batch = wait_for(partial(receive_rollouts, inbox, step), f"rollouts for step {step}", settings.wait_s)
        if not 0 <= step - batch.version <= settings.staleness:
            raise RunError(f"rollouts of version {batch.version} for step {step}; granted are {settings.staleness}")
        done = trainer.step(batch)
        state = trainer.weights()
        history.append({**asdict(done), "digest": digest_state(state, workers=1).hex})
        _save(trainer, history, saved)
        weights.publish(state, trainer.steps)


def run_sampler(settings: PairSettings, folder: Path) -> None:
    """The sampler's process: has no state of its own beside what it takes from the store.

    Raises:
        RunError: the trainer does not answer.
    """
    subscriber, outbox = Subscriber(_store(folder, "weights"), workers=1), _store(folder, "rollouts")
    model, task = settings.new_model(), settings.task
    for step in range(settings.steps):
        if outbox.size(_ready(step)) is not None:
            continue
        version = max(0, step - settings.staleness)

        def look(wanted: int = version) -> bool | None:
            subscriber.poll(most=wanted)
            return True if subscriber.version == wanted else None

        wait_for(look, f"version {version} of the weights", settings.wait_s)
        model.load_state_dict(dict(subscriber.state or {}))
        send_rollouts(outbox, sample_rollouts(model, task, settings.grpo, step=step, version=version))


def run_alone(settings: PairSettings) -> list[dict[str, Any]]:
    """The same run in one process without a store: the sampler's weights are full copies. Returns the history."""
    trainer = GrpoTrainer(settings.start_model(), settings.task, settings.grpo)
    model, history = settings.new_model(), []
    copies = [trainer.weights()]
    while trainer.steps < settings.steps:
        step = trainer.steps
        version = max(0, step - settings.staleness)
        model.load_state_dict(copies[version])
        batch = sample_rollouts(model, settings.task, settings.grpo, step=step, version=version)
        done = trainer.step(batch)
        copies.append(trainer.weights())
        history.append({**asdict(done), "digest": digest_state(copies[-1], workers=1).hex})
    return history


def _main(role: str, folder: str) -> None:
    """What a process of the pair does; its own traceback goes to a file beside the store."""
    torch.set_num_threads(1)
    place = Path(folder)
    try:
        settings = PairSettings.read((place / "settings.json").read_text())
        (run_trainer if role == "trainer" else run_sampler)(settings, place)
    except Exception:
        results.write_text(place / f"{role}.error", traceback.format_exc())
        raise SystemExit(1) from None


@dataclass
class Pair:
    """The two processes of one run; a context manager that leaves none of them behind.

    Args:
        settings: of the run; a folder with other settings is refused.
        folder: of the stores and the trainer's state; one that holds a part of the run continues it.

    Raises:
        RunError: the folder holds another run.
    """

    settings: PairSettings
    folder: Path
    processes: dict[str, Any] = field(default_factory=dict, init=False)

    def __enter__(self) -> Pair:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        if path.exists() and path.read_text() != self.settings.write():
            raise RunError(f"{self.folder} holds a run with other settings; use another folder")
        results.write_text(path, self.settings.write())
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["labs.pulse.trainer_sampler"])
        for role in ROLES:
            (self.folder / f"{role}.error").unlink(missing_ok=True)
            self.processes[role] = context.Process(target=_main, args=(role, str(self.folder)), daemon=True)
            self.processes[role].start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()

    def kill(self, role: str) -> None:
        """End one process at once, as a crash of its machine would."""
        os.kill(self.processes[role].pid, signal.SIGKILL)

    def wait(self) -> list[dict[str, Any]]:
        """Wait for both, and return the history.

        Raises:
            WorkerDied: one of them ended otherwise than by having done its work; the other is ended too.
        """
        while any(p.is_alive() for p in self.processes.values()):
            self._check()
            time.sleep(0.02)
        self._check()
        return history_of(self.folder)

    def _check(self) -> None:
        for role, process in self.processes.items():
            code = process.exitcode
            if code:
                path = self.folder / f"{role}.error"
                how = f"was killed by signal {-code}" if code < 0 else f"failed with\n{path.read_text().strip()}"
                steps = len(history_of(self.folder))
                raise WorkerDied(f"the {role} {how}\n{steps} steps are done; start the run again to go on from there")


def run_pair(settings: PairSettings, folder: Path) -> list[dict[str, Any]]:
    """Run trainer and sampler in processes of their own until the run is done; see :class:`Pair`."""
    with Pair(settings, folder) as pair:
        return pair.wait()
