"""First half of the lab: a trainer publishes every version, and everyone else follows the store.

Rank 0 trains and publishes. Every rank, rank 0 too, holds a subscriber of its own on the same store; the last rank acts
with what it received and samples the next batch. Version v is the weights after v steps. A run that was killed goes on
from its saved state with a store of its own, in which version 0 is that state.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dist_lib.comm import collectives
from dist_lib.models import Decoder, load_smollm2
from dist_lib.pulse import (
    CODECS,
    Publisher,
    SparsityRecorder,
    Store,
    Subscriber,
    count_changes,
    diff,
    digest_state,
    encode,
)
from dist_lib.tasks import (
    Addition,
    GrpoConfig,
    GrpoTrainer,
    Rollouts,
    VerifiableTask,
    accuracy,
    sample_rollouts,
    warm_start,
)
from labs.framework import RunContext
from labs.pulse.config import Config
from labs.pulse.stream import FewShotSums

DISTANCES = (1, 2, 4, 8, 16)
PAUSE_S = 0.005  # between two looks into the store
PATIENCE_S = 60.0  # how long a follower waits for a version that the trainer has announced


def build(config: Config, context: RunContext) -> tuple[Decoder, VerifiableTask]:
    """The model, the same on every rank, and its task; small ones are warm-started once in a process."""
    if config.model == "smollm2":
        real, tokenizer = load_smollm2()
        return real.to(context.device), FewShotSums(tokenizer)
    task = Addition(config.digits)
    shape = task.model_config(d_model=config.d_model, n_layers=config.n_layers, d_ff=11 * config.d_model // 4)
    model = Decoder(shape, seed=context.seed).to(context.device)
    if (config, context.seed, context.device) not in _WARM:
        warm_start(model, task, steps=config.warm_steps, seed=context.seed)
        _WARM.clear()  # one run after the other, each with several models that begin alike
        _WARM[config, context.seed, context.device] = {n: t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(_WARM[config, context.seed, context.device])
    return model, task


def share_right(model: Decoder, task: VerifiableTask) -> float:
    """Share of problems with the right answer; fewer problems for the real model, which has only 81 different ones."""
    return accuracy(model, task, problems=1000 if isinstance(task, Addition) else 81)


_WARM: dict[tuple[Config, int, torch.device], dict[str, Tensor]] = {}


def grpo_settings(config: Config, seed: int) -> GrpoConfig:
    """Settings of the trainer and of the sampler."""
    return GrpoConfig(
        lr=config.lr,
        prompts=config.prompts,
        samples=config.samples,
        storage=config.storage,
        optimizer=config.optimizer,
        seed=seed,
    )


@dataclass
class Follower:
    """One rank's copy of the weights, filled from the store alone.

    Attributes:
        subscriber: on the store.
        acting: the decoder that holds what was received.
        fetched: payload bytes.
    """

    subscriber: Subscriber
    acting: Decoder
    fetched: int = 0

    def catch_up(self, version: int) -> None:
        """Poll until ``version`` is held.

        Raises:
            TimeoutError: it did not come.
        """
        begin = time.monotonic()
        while (self.subscriber.version or 0) < version or self.subscriber.state is None:
            update = self.subscriber.poll()
            self.fetched += update.nbytes if update else 0
            time.sleep(0.0 if update else PAUSE_S)
            if time.monotonic() - begin > PATIENCE_S:
                raise TimeoutError(f"version {version} is not in {self.subscriber.store.url} after {PATIENCE_S:.0f} s")
        with torch.no_grad():
            for name, parameter in self.acting.named_parameters():
                parameter.copy_(self.subscriber.state[name])


@dataclass
class Sizes:
    """What all versions so far changed and took; part of the saved state.

    Attributes:
        changed: cells.
        cells: of all versions together.
        coded: bytes of the patches by codec; those of the run's own codec are the ones that were published.
    """

    changed: int = 0
    cells: int = 0
    coded: dict[str, int] = field(default_factory=dict)

    def add(self, old: dict[str, Tensor], new: dict[str, Tensor], version: int) -> float:
        """Count the patch that makes one more version; returns the share of changed cells."""
        patch = diff(old, new, base_version=version - 1, version=version)
        counts = count_changes(old, new).values()
        changed, cells = sum(c.changed for c in counts), sum(c.cells for c in counts)
        for codec in CODECS:
            self.coded[codec] = self.coded.get(codec, 0) + len(encode(patch, codec))
        self.changed, self.cells = self.changed + changed, self.cells + cells
        return changed / cells


def shared_rollouts(
    batch: Rollouts | None, config: Config, task: VerifiableTask, context: RunContext, step: int
) -> Rollouts:
    """The last rank's batch on every rank."""
    rows, last = config.prompts * config.samples, context.dist.world_size - 1
    if batch is None:
        tokens = torch.empty(rows, task.prompt_len + task.answer_len, dtype=torch.int64)
        batch = Rollouts(
            step, step, tokens, torch.empty(rows, task.answer_len), torch.empty(config.prompts, config.samples)
        )
    parts = [t.to(context.device) for t in (batch.tokens, batch.log_probs, batch.rewards)]
    return Rollouts(step, step, *(collectives.broadcast(t, last).cpu() for t in parts))


def train_and_publish(config: Config, context: RunContext, total: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """GRPO whose sampler is fed by patches; every rank calls this.

    Args:
        config: of the lab.
        context: of the run.
        total: steps of the whole lab, for progress.
        saved: state of a run that is resumed.

    Returns:
        Metrics; on ranks other than 0 only what every rank knows.
    """
    main, last = context.dist.is_main, context.dist.rank == context.dist.world_size - 1
    with context.timed("warm start"):
        model, task = build(config, context)
    settings = grpo_settings(config, context.seed)
    trainer = GrpoTrainer(model, task, settings)  # steps on rank 0 only
    recorder, sizes, before = SparsityRecorder(DISTANCES), Sizes(), share_right(trainer.acting, task)
    if saved is not None:
        trainer.load_state_dict(saved["trainer"])
        sizes, before = Sizes(**saved["sizes"]), saved["before"]
    held, first = trainer.weights(), trainer.steps
    recorder.record(held)
    store = _fresh_store(context, first)
    follower = Follower(Subscriber(store), model)
    publisher = Publisher(store, codec=config.codec, anchor_every=config.anchor_every) if main else None
    for step in range(first, config.steps + 1):
        if publisher is not None:
            with context.timed("publish"):
                publisher.publish(held)
        with context.timed("follow"):
            follower.catch_up(step - first)
        if step == config.steps:
            break
        with context.timed("sample"):
            batch = sample_rollouts(follower.acting, task, settings, step=step, version=step) if last else None
        batch = shared_rollouts(batch, config, task, context, step)
        if main:
            with context.timed("train"):
                took = trainer.step(batch)
            now = trainer.weights()
            recorder.record(now)
            changed = sizes.add(held, now, step + 1)
            context.log_step(step + 1, total, reward=took.reward, changed_percent=100 * changed)
            held = now
            if (step + 1) % config.save_every == 0:
                state = {"trainer": trainer.state_dict(), "sizes": asdict(sizes), "before": before, "outcomes": {}}
                context.save_state(state)
    holding = _ranks_that_hold(held, follower, context)
    if not main:
        return {}
    found = {"ranks_that_hold_the_trainers_bits": holding, "accuracy_before": before}
    found |= _measured(trainer, task, recorder, sizes, config, follower)
    if config.twin:
        with context.timed("twin"):
            found["tensors_equal_to_twin"] = _twin(config, context, trainer)
    return found


def _fresh_store(context: RunContext, first: int) -> Store:
    """An empty store for the steps from ``first`` on, the same on every rank. Collective."""
    taken = len(list(context.directory.glob("store-*")))
    number = collectives.broadcast(torch.tensor(taken, device=context.device), 0)
    return Store(str(context.directory / f"store-{int(number)}-from-step-{first}"))


def _ranks_that_hold(weights: dict[str, Tensor], follower: Follower, context: RunContext) -> str:
    """How many ranks received the very bits that rank 0 trained. Collective."""
    digest = torch.tensor(list(digest_state(weights).whole), dtype=torch.uint8, device=context.device)
    collectives.broadcast(digest, 0)
    received = digest_state(dict(follower.subscriber.state or {})).whole
    same = torch.tensor(int(bytes(digest.tolist()) == received), device=context.device)
    return f"{int(collectives.all_reduce(same))} of {context.dist.world_size}"


def _measured(
    trainer: GrpoTrainer,
    task: VerifiableTask,
    recorder: SparsityRecorder,
    sizes: Sizes,
    config: Config,
    follower: Follower,
) -> dict[str, Any]:
    cells = sum(p.numel() for p in trainer.model.parameters())
    found: dict[str, Any] = {
        "parameters": cells,
        "accuracy_after": share_right(trainer.acting, task),
        "unchanged_after_1_step_percent": 100 * (1 - sizes.changed / sizes.cells),
    }
    found |= {
        f"unchanged_after_{k}_steps_percent": 100 * recorder.mean(k) for k in DISTANCES[1:] if recorder.history[k]
    }
    patches = sizes.coded[config.codec]
    found |= {
        "full_copy_bytes": 2 * cells,
        "patch_bytes_mean": patches / config.steps,
        "full_copy_over_patch": 2 * cells * config.steps / patches,
        "bytes_fetched_by_rank_0": follower.fetched,
    }
    return found | {f"bytes_per_change_{c}": n / max(1, sizes.changed) for c, n in sizes.coded.items()}


def _twin(config: Config, context: RunContext, trainer: GrpoTrainer) -> str:
    """Train with full copies: the sampler acts with the trainer's own tensors. Tensors with the same bits."""
    model, task = build(config, context)
    settings = grpo_settings(config, context.seed)
    other = GrpoTrainer(model, task, settings)
    for step in range(config.steps):
        other.step(sample_rollouts(other.acting, task, settings, step=step, version=step))
    mine, theirs = trainer.model.state_dict(), other.model.state_dict()
    equal = sum(torch.equal(mine[n].view(torch.int32), theirs[n].view(torch.int32)) for n in mine)
    return f"{equal} of {len(mine)}"
