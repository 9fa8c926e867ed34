"""Train the small decoder with Muon and with AdamW on the same batches, several seeds each.

Muon takes the hidden matrices and AdamW the rest, with one learning rate; the control is AdamW on everything. Both
learning rates come from one recorded sweep (``labs/muon/sweep.py``). Data parallel and replicated on any number of
ranks: gradients are averaged, then every rank does the whole step. One process with ``shards = N`` is the exact twin.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_lib import viz
from dist_lib.comm import ExactReducer, agree
from dist_lib.models import Decoder, get_config, parameter_counts
from dist_lib.optim import SCALES, MuonWithAdamW, warmup_cosine
from dist_lib.results import RunRecord
from dist_lib.tasks import BatchSampler, load_corpus
from labs.framework import STATE, Lab, RunContext
from labs.training import DataParallelStep, TrainingSettings, payload_bytes_per_step, train, validation_loss

NAMES = ("adamw", "muon")
LABELS = {"adamw": "AdamW", "muon": "Muon, AdamW for the rest"}
COLORS = {"adamw": viz.PAPER["baseline"], "muon": viz.PAPER["muon"]}
WINDOW = 10  # steps over which a training loss is averaged before curves are compared


@dataclass(frozen=True, kw_only=True)
class Config(TrainingSettings):
    """Settings beside those of every training; ``steps`` are those of each training.

    Attributes:
        seeds: trainings of each optimizer, with the run's seed and those that follow it.
        muon_lr: of Muon and of AdamW beside it; its meaning depends on ``scale``.
        adamw_lr: of the control.
        warmup: steps of linear warm-up; then half a cosine to a tenth of the learning rate.
        scale: how Muon's update is scaled.
        ns_steps: Newton-Schulz steps.
        ns_coefficients: name of a coefficient set.
    """

    seeds: int
    muon_lr: float
    adamw_lr: float
    warmup: int = 10
    scale: str = "match_rms_adamw"
    ns_steps: int = 5
    ns_coefficients: str = "polar_express"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(seeds=1, ns_steps=1, warmup=0, above=["muon_lr", "adamw_lr"])
        if self.scale not in SCALES:
            raise ValueError(f"scale = {self.scale!r} must be one of {', '.join(SCALES)}")


@dataclass
class Outcome:
    """What one training gave."""

    losses: list[float] = field(default_factory=list)
    validation: float = float("nan")
    optimizer_s: float = 0.0
    steps_here: int = 0
    orthogonalised: int = 0
    payload_bytes: int = 0


def make_optimizer(name: str, model: Decoder, config: Config) -> torch.optim.Optimizer:
    """The optimizer of one training: ``"muon"`` or ``"adamw"``."""
    if name == "adamw":
        return torch.optim.AdamW(
            model.parameters(), lr=config.adamw_lr, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )
    return MuonWithAdamW(
        model,
        lr=config.muon_lr,
        weight_decay=config.weight_decay,
        scale=config.scale,
        ns_steps=config.ns_steps,
        ns_coefficients=config.ns_coefficients,
    )


def train_once(name: str, seed: int, config: Config, context: RunContext) -> Outcome:
    """One training; ``context`` is of this training alone, and every rank calls this."""
    model = Decoder(get_config(config.model), seed=seed).to(context.device)
    corpus = load_corpus()
    sampler = BatchSampler(corpus.train, batch_size=config.batch_size, seq_len=config.seq_len, seed=seed)
    optimizer = make_optimizer(name, model, config)
    rates = [group["lr"] for group in optimizer.param_groups]
    factor = warmup_cosine(total_steps=config.steps, warmup_steps=min(config.warmup, config.steps - 1), final=0.1)

    def set_rate(step: int) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)

    step = DataParallelStep(model, sampler, context, ExactReducer(ordered=config.ordered), shards=config.shards)
    steps, _ = train(step, [optimizer], steps=config.steps, save_every=config.save_every, before_step=set_rate)
    agree(list(model.state_dict().values()), what=f"the weights trained with {name}")
    return Outcome(
        losses=[row["loss"] for row in context.history],
        validation=validation_loss(model, corpus, seq_len=config.seq_len),
        optimizer_s=context.timings.get("optimizer", 0.0),
        steps_here=steps,
        orthogonalised=optimizer.muon.orthogonalised if isinstance(optimizer, MuonWithAdamW) else 0,
        payload_bytes=step.count.comm_bytes,
    )


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Train both optimizers for every seed; called on every rank."""
    agree(config, what="the configuration")
    plan = [(seed, name) for seed in range(context.seed, context.seed + config.seeds) for name in NAMES]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in NAMES}
    rows: list[dict[str, Any]] = []
    for index, (seed, name) in enumerate(plan):
        before = index * config.steps

        def forward(row: dict[str, Any], name: str = name, seed: int = seed, before: int = before) -> None:
            context.log_step(before + row["step"], len(plan) * config.steps, seed=seed, **{name: row["loss"]})

        directory = context.directory / f"{name}-{seed}"
        resumed = context.resumed and (directory / STATE).exists()
        part = RunContext(context.dist, seed, directory, resumed, forward)
        outcomes[name].append(train_once(name, seed, config, part))
        for key, seconds in part.timings.items():
            label = f"{name} {key}"
            context.timings[label] = context.timings.get(label, 0.0) + seconds
        rows += [{"step": before + r["step"], "seed": float(seed), name: r["loss"]} for r in part.history]
    context.history[:] = rows  # a resumed run also shows the steps of before
    return metrics(config, context.dist.world_size, outcomes)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Mean of each step's loss and up to nine before it."""
    return [statistics.fmean(losses[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(losses))]


def mean_curve(outcomes: Sequence[Outcome]) -> list[float]:
    """Smoothed training loss of each step, averaged over seeds."""
    return [statistics.fmean(values) for values in zip(*(smoothed(o.losses) for o in outcomes), strict=False)]


def metrics(config: Config, world: int, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Compare the two: validation losses, their spread over seeds, and steps to the same loss."""
    parameters = parameter_counts(get_config(config.model)).total
    found: dict[str, Any] = {"parameters": parameters}
    for name in NAMES:
        values = [o.validation for o in outcomes[name]]
        found[f"{name}_validation_loss"] = statistics.fmean(values)
        found[f"{name}_validation_spread"] = max(values) - min(values)
        steps = sum(o.steps_here for o in outcomes[name])
        found[f"{name}_optimizer_ms_per_step"] = 1e3 * sum(o.optimizer_s for o in outcomes[name]) / max(1, steps)
    gains = [a.validation - m.validation for a, m in zip(outcomes["adamw"], outcomes["muon"], strict=True)]
    found |= {"muon_gain": statistics.fmean(gains), "muon_gain_least": min(gains), "muon_gain_most": max(gains)}
    ours, control = mean_curve(outcomes["muon"]), mean_curve(outcomes["adamw"])
    if ours and control:  # only rank 0 keeps the losses
        settled = range(min(WINDOW, len(ours)) - 1, len(ours))
        reached = next((i + 1 for i in settled if ours[i] <= control[-1]), None)
        found["muon_steps_to_adamw_loss"] = reached if reached is not None else "not reached"
    matrices = 7 * get_config(config.model).n_layers
    found["orthogonalised_predicted"] = matrices * sum(o.steps_here for o in outcomes["muon"])
    found["orthogonalised_counted"] = sum(o.orthogonalised for o in outcomes["muon"])
    found["payload_bytes_predicted"] = payload_bytes_per_step(parameters, world)
    found["payload_bytes_counted"] = outcomes["muon"][0].payload_bytes
    return found


def curves(record: RunRecord) -> dict[str, list[Outcome]]:
    """Training losses of a record, by optimizer, one entry a seed."""
    out: dict[str, list[Outcome]] = {}
    for name in NAMES:
        seeds = sorted({row["seed"] for row in record.history if name in row})
        out[name] = [Outcome([r[name] for r in record.history if r["seed"] == s and name in r]) for s in seeds]
    return out


def figures(record: RunRecord) -> list[Any]:
    """The training losses of both, and the validation losses with their spread."""
    traces = []
    style: dict[str, Any]
    for name, outcomes in curves(record).items():
        for index, outcome in enumerate(outcomes):
            y = smoothed(outcome.losses)
            style = {"color": COLORS[name], "legendgroup": name, "showlegend": index == 0}
            traces.append(viz.line(range(1, len(y) + 1), y, LABELS[name], **style))
    found = record.metrics
    values = {name: found[f"{name}_validation_loss"] for name in NAMES if f"{name}_validation_loss" in found}
    text = ", ".join(f"{LABELS[n]} {v:.3f}" for n, v in values.items()) or "not finished"
    loss = viz.figure(
        title="Muon and AdamW on the same batches",
        x="step",
        y=f"training loss, mean of {WINDOW} steps (nats a byte)",
        alt=f"Training loss of each seed for both optimizers; validation loss at the end: {text} nats a byte.",
        traces=traces,
    )
    bars = viz.figure(
        title="Validation loss at the end, range over seeds",
        x="optimizer",
        y="loss (nats a byte)",
        alt=f"Mean validation loss over seeds: {text}, nats a byte; whiskers span half the range over seeds.",
        traces=[
            viz.bar(
                [LABELS[n]],
                [v],
                LABELS[n],
                color=COLORS[n],
                error_y={"type": "data", "array": [found[f"{n}_validation_spread"] / 2]},
            )
            for n, v in values.items()
        ],
    )
    return [loss, bars]


LAB = Lab("muon", "Muon against AdamW", Config, run, figures)

if __name__ == "__main__":
    from labs.cli import lab_main

    lab_main(LAB)
