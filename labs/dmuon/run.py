"""Train the small decoder with owner-sharded Muon and with what it is compared with, on the same batches.

Owners, Muon on every rank, Muon that gathers or exchanges whole gradients, and AdamW for everything: the same model,
batches and kernels. Bytes are counted and compared with the formulas, orthogonalisations are counted by name, and the
weights are compared bit by bit with those of a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dist_lib.comm import CommCounter, agree, collectives
from dist_lib.dmuon.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.models import Decoder, get_config, parameter_counts
from dist_lib.optim import warmup_cosine
from dist_lib.tasks import BatchSampler, load_corpus
from labs.dmuon.config import Config
from labs.dmuon.methods import Method, Twin, build, digests, owner_plan
from labs.dmuon.plots import event_rows, figures
from labs.framework import Lab, RunContext
from labs.training import validation_loss

RECORDED = 2  # last steps of the owners' training whose events are kept


@dataclass
class Outcome:
    """What one training gave; plain values, so that it can be saved."""

    validation: float = 0.0
    counted: list[int] = field(default_factory=list)
    formula: list[int] = field(default_factory=list)
    most: int = 0
    least: int = 0
    momentum: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def schedule(config: Config) -> Any:
    """Share of the peak learning rate in each step."""
    return warmup_cosine(total_steps=config.steps, warmup_steps=min(config.warmup, config.steps - 1), final=0.1)


def one_step(method: Method, sampler: BatchSampler, step: int, context: RunContext) -> float:
    """Forward, backward and update on this rank's part of the batch; returns its loss."""
    world, rank = context.dist.world_size, context.dist.rank
    tokens, targets = (t.to(context.device) for t in sampler.shard(step, rank, world))
    loss: torch.Tensor = method.model.loss(tokens, targets)
    loss.backward()
    method.optimizer.step()
    method.optimizer.zero_grad()
    return float(loss.detach())


def mean_over_ranks(value: float, context: RunContext) -> float:
    """Mean of a number over all ranks, on every rank."""
    return float(collectives.all_reduce(torch.tensor(value, device=context.device)) / context.dist.world_size)


def of_every_rank(value: int, context: RunContext) -> list[int]:
    """A whole number of each rank, on every rank."""
    return [int(n) for n in collectives.all_gather(torch.tensor(value, dtype=torch.int64, device=context.device))]


def train_once(name: str, config: Config, context: RunContext, before: int, total: int) -> Outcome:
    """Train with one method; every rank calls this.

    Args:
        name: of the method.
        config: of the lab.
        context: of the run.
        before: steps of the trainings that came first.
        total: steps of all trainings.
    """
    world = context.dist.world_size
    method = build(name, config, seed=context.seed, world=world, device=context.device)
    corpus, factor = load_corpus(), schedule(config)
    sampler = BatchSampler(corpus.train, batch_size=config.batch_size, seq_len=config.seq_len, seed=context.seed)
    folder, first, outcome = context.directory / "owners", 0, Outcome()
    runtime = method.runtime
    if runtime is not None and context.resumed and latest_checkpoint(folder) is not None:
        assert isinstance(method.optimizer, DMuon)
        first, _ = load_checkpoint(folder, runtime, method.optimizer)
    context.history[:] = [row for row in context.history if row["step"] <= before + first]
    for step in range(first, config.steps):
        method.set_lr(factor(step))
        if runtime is not None:
            runtime.log.enabled = step >= config.steps - RECORDED
        last = step == config.steps - 1
        with context.timed(name), CommCounter() as counter:
            loss = one_step(method, sampler, step, context)
        loss = mean_over_ranks(loss, context)
        context.log_step(before + step + 1, total, **{name: loss})
        if last:
            outcome.counted = of_every_rank(method.payload(counter), context)
            outcome.formula = of_every_rank(method.formula(context.dist.rank, config.mode, config.shards), context)
        elif runtime is not None and config.save_every and (step + 1) % config.save_every == 0:
            assert isinstance(method.optimizer, DMuon)
            if latest_checkpoint(folder) is None or step + 1 > first:
                save_checkpoint(folder, runtime, method.optimizer, step=step + 1)
            context.save_state({"outcomes": {}})
    if runtime is not None:
        runtime.drain()  # what the last step published asynchronously
        context.history += event_rows(runtime.log, context)
    finish(method, name, config, context, outcome, steps=config.steps - first)
    return outcome


def finish(method: Method, name: str, config: Config, context: RunContext, outcome: Outcome, *, steps: int) -> None:
    """Fill in what is found out at the end: weights, validation loss, orthogonalisations a step, momentum."""
    weights = method.weights()
    agree(list(weights.values()), what=f"the weights trained with {name}")
    whole = Decoder(get_config(config.model), seed=context.seed)
    whole.load_state_dict(weights)
    outcome.validation = validation_loss(whole.to(context.device), load_corpus(), seq_len=config.seq_len)
    outcome.digests = digests(dict(whole.cpu().named_parameters()))
    times = list(method.optimizer.total_histogram().values())
    outcome.most, outcome.least = (max(times) // steps, min(times) // steps) if times else (0, 0)
    outcome.momentum = of_every_rank(method.momentum_bytes(), context)


def train_twin(config: Config, context: RunContext) -> list[str]:
    """Hashes of the weights of the single process, trained on rank 0; elsewhere nothing."""
    if not (config.twin and context.dist.is_main):
        return []
    twin = Twin(config, seed=context.seed, world=context.dist.world_size, device=context.device)
    corpus, factor = load_corpus(), schedule(config)
    sampler = BatchSampler(corpus.train, batch_size=config.batch_size, seq_len=config.seq_len, seed=context.seed)
    for step in range(config.steps):
        twin.step(sampler, step, factor(step))
    return digests(dict(twin.model.cpu().named_parameters()))


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Train with every method; called on every rank."""
    agree(config, what="the configuration")
    if config.batch_size % context.dist.world_size:
        raise ValueError(f"batch_size = {config.batch_size} must be a multiple of the {context.dist.world_size} ranks")
    plan = ("dmuon", *config.compared)
    state = context.load_state() or {"outcomes": {}}
    outcomes = {name: Outcome(**found) for name, found in state["outcomes"].items()}
    for index, name in enumerate(plan):
        if name not in outcomes:
            outcomes[name] = train_once(name, config, context, index * config.steps, len(plan) * config.steps)
            context.save_state({"outcomes": {n: asdict(o) for n, o in outcomes.items()}})
    with context.timed("twin"):
        twin = train_twin(config, context)
    return metrics(config, context.dist.world_size, outcomes, twin)


def metrics(config: Config, world: int, outcomes: dict[str, Outcome], twin: Sequence[str]) -> dict[str, Any]:
    """Losses, bytes against formulas, counts of orthogonalisations, and tensors equal to the single process's."""
    probe = owner_plan(Decoder(get_config(config.model), seed=0), config, world)
    found: dict[str, Any] = {
        "parameters": parameter_counts(get_config(config.model)).total,
        "matrices": len(probe.matrices),
        "ranks": world,
        "fullest_owner_over_mean": probe.balance,
    }
    owners = outcomes["dmuon"]
    planned = [n // 2 for n in probe.bytes_per_rank]  # half of the state is momentum, the other half master weights
    found["ranks_with_momentum_bytes_as_planned"] = (
        f"{sum(a == b for a, b in zip(owners.momentum, planned, strict=True))} of {world}"
    )
    for name, outcome in outcomes.items():
        key = name.replace("-", "_")
        found[f"{key}_validation_loss"] = outcome.validation
        found[f"{key}_bytes_per_step"] = max(outcome.counted)
        same = sum(a == b for a, b in zip(outcome.counted, outcome.formula, strict=True))
        found[f"{key}_ranks_with_bytes_of_the_formula"] = f"{same} of {world}"
        if name != "adamw":
            span = {outcome.least, outcome.most}
            found[f"{key}_times_orthogonalised_a_step"] = " to ".join(map(str, sorted(span)))
            if twin:
                equal = sum(a == b for a, b in zip(outcome.digests, twin, strict=True))
                found[f"{key}_tensors_equal_to_twin"] = f"{equal} of {len(twin)}"
    return found


LAB = Lab("dmuon", "Muon with one owner a matrix", Config, run, figures)

if __name__ == "__main__":
    from labs.cli import lab_main

    lab_main(LAB)
