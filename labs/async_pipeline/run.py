"""Train the small decoder three ways with each optimizer: synchronously, one step late, and late with error feedback.

The model is cut into as many stages as there are ranks (divided by the replicas), and all trainings run in the same
pipeline: without delay it drains after every batch, with the delay it does not. One process is a pipeline of one
stage; the delay is one at every depth, so that is enough to see what it does to training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dist_lib.async_pipeline import AsyncConfig, DelayedTrainer, Pipeline, PipelineMesh, split_decoder
from dist_lib.async_pipeline.checkpoint import load_checkpoint, save_checkpoint
from dist_lib.comm import agree, collectives
from dist_lib.models import Decoder, get_config, parameter_counts
from dist_lib.optim import MuonWithAdamW, ParameterSplit, split_parameters, warmup_cosine
from dist_lib.tasks import BatchSampler, load_corpus
from labs.async_pipeline.plots import event_rows, figures
from labs.framework import STATE, Lab, RunContext
from labs.training import validation_loss

OPTIMIZERS = ("adamw", "muon")
VARIANTS = ("sync", "delay", "feedback")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings.

    Attributes:
        model: name of a decoder configuration; its layers are cut into stages.
        steps: batches of each training.
        batch_size: sequences in a batch.
        seq_len: tokens in a sequence.
        seeds: trainings of each kind, with the run's seed and those that follow it.
        micro_batches: equal parts of a batch (of a replica's share of it).
        replicas: pipelines side by side; the ranks are stages times replicas.
        adamw_lr: peak learning rate of AdamW.
        muon_lr: of Muon and of AdamW beside it.
        weight_decay: of both, inside the update.
        warmup: steps of linear warm-up; then half a cosine to a tenth of the peak.
        clip_norm: largest norm of the gradient over all stages; 0 does not clip.
        twin: afterwards train once more in a single process and compare the weights bit by bit.
        drain_every: batches between two drains, at which progress is shown and state can be saved.
        save_every: batches between saved states; 0 never saves.
    """

    model: str
    steps: int
    batch_size: int
    seq_len: int
    seeds: int
    micro_batches: int
    adamw_lr: float
    muon_lr: float
    replicas: int = 1
    weight_decay: float = 0.1
    warmup: int = 10
    clip_norm: float = 1.0
    twin: bool = False
    drain_every: int = 25
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "seeds", "micro_batches", "replicas", "drain_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("adamw_lr", "muon_lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if min(self.weight_decay, self.warmup, self.clip_norm, self.save_every) < 0:
            raise ValueError("weight_decay, warmup, clip_norm and save_every must be at least 0")
        if self.batch_size % (self.micro_batches * self.replicas):
            raise ValueError(
                f"batch_size = {self.batch_size} must be a multiple of micro_batches x replicas = "
                f"{self.micro_batches * self.replicas}"
            )
        if self.twin and self.replicas > 1:
            raise ValueError("twin = true needs replicas = 1: the single process adds micro-batches in one order")

    def variant(self, name: str) -> AsyncConfig:
        """The pipeline's configuration of one variant."""
        return AsyncConfig(
            micro_batches=self.micro_batches,
            delay=0 if name == "sync" else 1,
            clip_norm=self.clip_norm or None,
            error_feedback=name == "feedback",
        )


@dataclass
class Outcome:
    """What one training gave."""

    validation: float
    predicted_idle: float
    twin: tuple[int, int] | None = None


def optimizer_maker(name: str, model: Decoder, config: Config) -> Callable[[list[tuple[str, nn.Parameter]]], Optimizer]:
    """What makes the optimizer of one stage; which matrices are Muon's is decided on the whole model."""
    matrices = {n for n, _ in split_parameters(model).muon}

    def make(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        if name == "adamw":
            return AdamW([p for _, p in named], lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
        split = ParameterSplit(
            muon=[(n, p) for n, p in named if n in matrices], adamw=[(n, p) for n, p in named if n not in matrices]
        )
        return MuonWithAdamW(split, lr=config.muon_lr, weight_decay=config.weight_decay)

    return make


def scheduler_maker(config: Config) -> Callable[[Optimizer], LRScheduler]:
    """Warm-up and half a cosine, counted in updates."""
    factor = warmup_cosine(total_steps=config.steps, warmup_steps=min(config.warmup, config.steps - 1), final=0.1)
    return lambda optimizer: LambdaLR(optimizer, factor)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, nats; logits (B, S, V), targets (B, S)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(config: Config, seed: int, first: int, count: int) -> Iterator[Batch]:
    """Batches ``first`` to ``first + count`` of one seed, the same on every rank."""
    sampler = BatchSampler(load_corpus().train, batch_size=config.batch_size, seq_len=config.seq_len, seed=seed)
    return (sampler.batch(step) for step in range(first, first + count))


def gather_weights(model: Decoder, pipeline: Pipeline, stages: list[nn.Module]) -> None:
    """Fill the whole model, on every rank, with what each stage has learned."""
    held = dict(pipeline.module.named_parameters())
    with torch.no_grad():
        for index, stage in enumerate(stages):
            for name, parameter in stage.named_parameters():
                source = held[name] if index == pipeline.mesh.stage else parameter
                value = source.detach().clone()
                collectives.broadcast(value, src=index * pipeline.mesh.replicas)
                parameter.copy_(value)


def train_once(optimizer: str, variant: str, seed: int, config: Config, context: RunContext) -> Outcome:
    """One training; every rank calls this."""
    model = Decoder(get_config(config.model), seed=seed).to(context.device)
    mesh = PipelineMesh(replicas=config.replicas)
    stages = split_decoder(model, mesh.stages)
    pipeline = Pipeline(
        stages,
        loss_fn=cross_entropy,
        make_optimizer=optimizer_maker(optimizer, model, config),
        make_scheduler=scheduler_maker(config),
        config=config.variant(variant),
        mesh=mesh,
        record_events=True,
    )
    checkpoints = context.directory / "checkpoints"
    if context.resumed:
        context.load_state()  # the steps logged so far, perhaps more than the checkpoint has
        load_checkpoint(pipeline, checkpoints)
        context.history[:] = [row for row in context.history if row["step"] <= pipeline.step]
    while pipeline.step < config.steps:
        first = pipeline.step
        with context.timed("pipeline"):
            losses = pipeline.run(batches(config, seed, first, min(config.drain_every, config.steps - first)))
        for index, loss in enumerate(losses):
            context.log_step(first + index + 1, config.steps, loss=loss)
        if pipeline.step == config.steps:
            context.history += event_rows(pipeline.events, mesh)
        if config.save_every and pipeline.step // config.save_every > first // config.save_every:
            context.save_state({"step": pipeline.step})
            save_checkpoint(pipeline, checkpoints)
    gather_weights(model, pipeline, stages)
    agree(list(model.state_dict().values()), what=f"the weights trained with {optimizer}, {variant}")
    found = validation_loss(model, load_corpus(), seq_len=config.seq_len)
    m, p = config.micro_batches, mesh.stages
    per_drain = m if variant == "sync" else m * min(config.drain_every, config.steps)
    outcome = Outcome(found, (p - 1) / (per_drain + p - 1))
    if config.twin and variant == "feedback":
        outcome.twin = compare_with_twin(model, optimizer, variant, seed, config, mesh.stages, context)
    return outcome


def compare_with_twin(
    model: Decoder, optimizer: str, variant: str, seed: int, config: Config, stages: int, context: RunContext
) -> tuple[int, int]:
    """Train in a single process, on rank 0, and count the tensors that have the same bits; (equal, all)."""
    counts = torch.zeros(2, dtype=torch.int64, device=context.device)
    if context.dist.is_main:
        twin = Decoder(get_config(config.model), seed=seed).to(context.device)
        trainer = DelayedTrainer(
            split_decoder(twin, stages),
            loss_fn=cross_entropy,
            make_optimizer=optimizer_maker(optimizer, twin, config),
            make_scheduler=scheduler_maker(config),
            config=config.variant(variant),
        )
        trainer.run(batches(config, seed, 0, config.steps))
        same = [torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
        counts = torch.tensor([sum(same), len(same)], device=context.device)
    collectives.broadcast(counts, src=0)
    return int(counts[0]), int(counts[1])


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Train every kind for every seed; called on every rank."""
    agree(config, what="the configuration")
    seeds = range(context.seed, context.seed + config.seeds)
    plan = [(seed, optimizer, variant) for seed in seeds for optimizer in OPTIMIZERS for variant in VARIANTS]
    outcomes: dict[tuple[str, str], list[Outcome]] = {(o, v): [] for o in OPTIMIZERS for v in VARIANTS}
    rows: list[dict[str, Any]] = []
    for index, (seed, optimizer, variant) in enumerate(plan):
        name, before = f"{optimizer} {variant}", index * config.steps

        def forward(row: dict[str, Any], name: str = name, seed: int = seed, before: int = before) -> None:
            context.log_step(before + row["step"], len(plan) * config.steps, seed=seed, **{name: row["loss"]})

        directory = context.directory / f"{optimizer}-{variant}-{seed}"
        part = RunContext(context.dist, seed, directory, context.resumed and (directory / STATE).exists(), forward)
        outcomes[optimizer, variant].append(train_once(optimizer, variant, seed, config, part))
        seconds = context.timings.get(name, 0.0) + part.timings.get("pipeline", 0.0)
        context.timings[name] = seconds
        rows += [
            {"step": before + r["step"], "seed": float(seed), name: r["loss"]} for r in part.history if "loss" in r
        ]
        if index == len(plan) - 1:
            rows += [r for r in part.history if "event_stage" in r]
    context.history[:] = rows  # a resumed run also shows the steps of before
    return metrics(config, context.dist.world_size, outcomes)


def metrics(config: Config, world: int, outcomes: dict[tuple[str, str], list[Outcome]]) -> dict[str, Any]:
    """Validation losses, the gap that the delay opens, and what is left of it with error feedback."""
    found: dict[str, Any] = {
        "parameters": parameter_counts(get_config(config.model)).total,
        "stages": world // config.replicas,
    }
    for optimizer in OPTIMIZERS:
        losses = {v: [o.validation for o in outcomes[optimizer, v]] for v in VARIANTS}
        for variant in VARIANTS:
            found[f"{optimizer}_{variant}_validation_loss"] = statistics.fmean(losses[variant])
        for variant, what in (("delay", "gap"), ("feedback", "gap_left")):
            gaps = [late - sync for late, sync in zip(losses[variant], losses["sync"], strict=True)]
            found[f"{optimizer}_{what}"] = statistics.fmean(gaps)
            found[f"{optimizer}_{what}_spread"] = max(gaps) - min(gaps)
        twins = [o.twin for o in outcomes[optimizer, "feedback"] if o.twin is not None]
        if twins:
            found[f"{optimizer}_tensors_equal_to_twin"] = f"{sum(t[0] for t in twins)} of {sum(t[1] for t in twins)}"
    found["idle_share_predicted_sync"] = outcomes["adamw", "sync"][0].predicted_idle
    found["idle_share_predicted_delay"] = outcomes["adamw", "delay"][0].predicted_idle
    return found


LAB = Lab("async_pipeline", "A pipeline without a bubble", Config, run, figures)

if __name__ == "__main__":
    from labs.cli import lab_main

    lab_main(LAB)
