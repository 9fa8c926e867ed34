"""Train the small decoder on the corpus with AdamW, predict what a step needs, and count it.

Data parallel on any number of ranks; one process with ``shards = N`` is the exact twin of N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dist_lib import viz
from dist_lib.comm import ExactReducer, NetworkModel, agree
from dist_lib.models import Decoder, activation_bytes, get_config, parameter_counts, training_flops
from dist_lib.results import RunRecord
from dist_lib.tasks import BatchSampler, load_corpus
from labs.framework import Lab, RunContext
from labs.training import DataParallelStep, TrainingSettings, payload_bytes_per_step, train, validation_loss

PARTS = ("forward", "backward", "communication", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        lr: of AdamW.
    """

    lr: float = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(above=["lr"])


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Train and weigh; called on every rank."""
    agree(config, what="the configuration")
    shape = get_config(config.model)
    corpus = load_corpus()
    model = Decoder(shape, seed=context.seed).to(context.device)
    sampler = BatchSampler(corpus.train, batch_size=config.batch_size, seq_len=config.seq_len, seed=context.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.95))
    step = DataParallelStep(model, sampler, context, ExactReducer(ordered=config.ordered), shards=config.shards)
    steps, loss = train(step, [optimizer], steps=config.steps, save_every=config.save_every)
    agree(list(model.state_dict().values()), what="the trained weights")
    return _metrics(config, context, model, step, steps, loss)


def _metrics(
    config: Config, context: RunContext, model: Decoder, step: DataParallelStep, steps: int, loss: float
) -> dict[str, Any]:
    world, parameters = context.dist.world_size, parameter_counts(model.config).total
    rows = step.rows_of_counted_shard
    seconds = {part: context.timings.get(part, 0.0) for part in PARTS}
    busy = sum(seconds.values())
    flops = training_flops(model.config, config.batch_size, config.seq_len)
    payload = payload_bytes_per_step(parameters, world)
    op = "all_gather" if config.ordered else "all_reduce"
    metrics: dict[str, Any] = {
        "parameters": parameters,
        "final_loss": loss,
        "validation_loss": validation_loss(model, load_corpus(), seq_len=config.seq_len),
        "flops_per_step": flops.total,
        "held_bytes_predicted": activation_bytes(model.config, rows, config.seq_len),
        "held_bytes_counted": step.count.held_bytes,
        "payload_bytes_predicted": payload,
        "payload_bytes_counted": step.count.comm_bytes,
        "link_bytes_per_step": float(NetworkModel.wire_bytes(op, payload, world)),
        "tokens_per_s": steps * config.batch_size * config.seq_len / busy if busy else 0.0,
        "gflops_per_s": flops.total * steps / busy / 1e9 if busy else 0.0,
    }
    return {**metrics, **{f"{part}_share": s / busy if busy else 0.0 for part, s in seconds.items()}}


def figures(record: RunRecord) -> list[Any]:
    """The loss, and where the time went."""
    steps = [row["step"] for row in record.history]
    loss = viz.figure(
        title="Loss on the corpus",
        x="step",
        y="loss (nats a byte)",
        alt=f"Training loss of each step; it ends at {record.history[-1]['loss']:.2f} nats a byte.",
        traces=[viz.line(steps, [row["loss"] for row in record.history], "AdamW", color=viz.PAPER["baseline"])],
    )
    kinds = [p for p in PARTS if record.metrics.get(f"{p}_share")]
    if not kinds:  # a resumed run that had nothing left to do
        return [loss]
    shares = [100 * record.metrics[f"{p}_share"] for p in kinds]
    time = viz.figure(
        title="Where the time of a step goes",
        x="part of the step",
        y="share (%)",
        alt="Shares of a step's time: " + ", ".join(f"{p} {s:.0f} %" for p, s in zip(kinds, shares, strict=True)),
        traces=[viz.bar([p], [s], p, color=viz.WORK[p]) for p, s in zip(kinds, shares, strict=True)],
    )
    return [loss, time]


LAB = Lab("baseline", "One training step, weighed", Config, run, figures)

if __name__ == "__main__":
    from labs.cli import lab_main

    lab_main(LAB)
