"""Train the small decoder as it is, then with each piece of AGoQ and with all of them, on the same batches.

Activations encoded for backward (A), gradients held and sent in 8 bits (G), AdamW's moments in 8 bits (O). What is held
and what is sent is counted and compared with formulas from shapes. What decides about a format is the error of the
whole gradient at the trained weights; losses of such short runs are shown and decide nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dist_lib.agoq import Format, moment_bytes, state_bytes
from dist_lib.agoq.quality import exact_gradient, gradient_quality
from dist_lib.comm import CommCounter, agree, collectives
from dist_lib.models import Decoder, SavedTensorCounter, get_config, parameter_counts
from dist_lib.optim import warmup_cosine
from dist_lib.tasks import BatchSampler, load_corpus
from labs.agoq import formulas
from labs.agoq.config import PIECES, Config
from labs.agoq.methods import Method, build, local, sharded_modules
from labs.agoq.plots import figures
from labs.framework import Lab, LabError, RunContext
from labs.training import validation_loss

REDUCTIONS = ("all_reduce", "reduce_scatter", "all_to_all")  # under FSDP2 weights travel by all-gathers
HELD_TOLERANCE = 0.01
SCHEME_ROWS = 8  # sequences; some schemes keep every attention weight
Weights = dict[str, Tensor]


@dataclass
class Outcome:
    """What one training gave; plain values, so that it can be saved. Pairs are (counted, by the formula)."""

    validation: float = 0.0
    first_loss: float = 0.0
    held: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    wire: list[list[int]] = field(default_factory=list)
    equal_ranks: int = 0


def rows_of(config: Config, context: RunContext) -> int:
    """Sequences of a micro-batch."""
    return config.batch_size // (context.dist.world_size * config.micro_batches)


def one_step(
    method: Method, config: Config, sampler: BatchSampler, step: int, context: RunContext, counted: Outcome | None
) -> float:
    """Forward and backward of all micro-batches of this rank, and the sum over ranks; returns the rank's mean loss.

    Args:
        method: what to train.
        config: of the lab.
        sampler: global batches.
        step: which.
        context: of the run.
        counted: also count into it what is held and sent.
    """
    tokens, targets = (t.to(context.device) for t in sampler.shard(step, context.dist.rank, context.dist.world_size))
    total = torch.zeros((), device=context.device)
    counter = CommCounter()
    sharded = config.parallel == "fsdp"
    for pair in zip(tokens.chunk(config.micro_batches), targets.chunk(config.micro_batches), strict=True):
        part = [t.clone() for t in pair]  # a view would keep the tokens of the whole batch
        held = SavedTensorCounter(method.model) if counted and not counted.held and not sharded else None
        with held or nullcontext():
            loss = method.model.loss(*part) / config.micro_batches
        if counted and held:
            counted.held = [held.bytes, _held_formula(method, config, context)]
        with counter if counted and sharded else nullcontext():
            loss.backward()  # under FSDP2 gradients travel here
        total += loss.detach()
    if counted:
        counted.gradients = [method.gradients.nbytes, _gradient_formula(method, config, context)]
    with counter if counted and not sharded else nullcontext():
        method.gradients.all_reduce()
    if counted:
        sent = sum(counter.bytes(op) for op in REDUCTIONS) if sharded else counter.bytes()
        mine = torch.tensor([sent, _wire_formula(method, config, context)], device=context.device)
        counted.wire = collectives.all_gather(mine).tolist()
    return float(total)


def _held_formula(method: Method, config: Config, context: RunContext) -> int:
    plan = config.plan() if method.has("A") else None
    shape = get_config(config.model)
    element = config.torch_dtype.itemsize
    return formulas.held_bytes(shape, rows_of(config, context), config.seq_len, plan, element)


def _sizes(method: Method) -> list[int]:
    return [local(p).numel() for p in method.model.parameters()]


def _gradient_formula(method: Method, config: Config, context: RunContext) -> int:
    form = config.form() if method.has("G") and config.parallel == "replicated" else None
    return formulas.gradient_bytes(_sizes(method), form, config.min_elements, context.dist.world_size)


def _wire_formula(method: Method, config: Config, context: RunContext) -> int:
    form, world = config.form() if method.has("G") else None, context.dist.world_size
    if config.parallel == "replicated":
        return formulas.payload_bytes(_sizes(method), form, config.min_elements, world)
    modules = sharded_modules(method.model)
    return config.micro_batches * formulas.sharded_payload_bytes(modules, form, config.min_elements, world)


def train_once(
    name: str, config: Config, context: RunContext, state: dict[str, Any], before: int, total: int
) -> tuple[Outcome, Method]:
    """Train with one method; every rank calls this.

    Args:
        name: of the method.
        config: of the lab.
        context: of the run.
        state: what is saved with the run; its entry ``current`` is this training's.
        before: steps of the trainings that came first.
        total: steps of all trainings.
    """
    method = build(name, config, seed=context.seed, device=context.device)
    sampler = BatchSampler(load_corpus().train, batch_size=config.batch_size, seq_len=config.seq_len, seed=context.seed)
    factor = warmup_cosine(total_steps=config.steps, warmup_steps=min(config.warmup, config.steps - 1), final=0.1)
    outcome, first = Outcome(), 0
    current = state.pop("current", None)
    if current is not None and current["name"] == name:
        method.load_state_dict(current)
        first, outcome.first_loss = int(current["step"]), float(current["first_loss"])
    agree(first, what=f"the step at which {name} goes on; resume from a state that all ranks have saved")
    context.history[:] = [row for row in context.history if row["step"] <= before + first]
    for step in range(first, config.steps):
        last = step == config.steps - 1
        with context.timed(name):
            mine = one_step(method, config, sampler, step, context, outcome if last else None)
            if config.clip_norm:
                method.gradients.clip_(config.clip_norm)
            method.step(config.lr * factor(step))
        loss = mean_over_ranks(mine, context)
        outcome.first_loss = loss if step == 0 else outcome.first_loss
        context.log_step(before + step + 1, total, **{name: loss})
        if config.save_every and (step + 1) % config.save_every == 0 and not last:
            now = {"name": name, "step": step + 1, "first_loss": outcome.first_loss, **method.state_dict()}
            save(config, context, {**state, "current": now})
    bits = 8 if method.has("O") else 32
    outcome.state = [state_bytes(method.optimizer), moment_bytes(_sizes(method), bits=bits)]
    rows = max(1, min(32, 16_384 // config.seq_len))
    outcome.validation = validation_loss(method.model, load_corpus(), seq_len=config.seq_len, rows=rows)
    if config.parallel == "replicated":
        outcome.equal_ranks = _equal_ranks(method, context)
    return outcome, method


def mean_over_ranks(value: float, context: RunContext) -> float:
    """Mean of a number over all ranks, the same on every rank."""
    number = torch.tensor(value, device=context.device)
    return float(collectives.ordered_sum(number) / context.dist.world_size)


def _equal_ranks(method: Method, context: RunContext) -> int:
    """How many ranks hold the weights that most ranks hold, by their digest."""
    digest = torch.tensor(list(bytes.fromhex(method.digest())), dtype=torch.uint8, device=context.device)
    prints = [bytes(row.tolist()) for row in collectives.all_gather(digest)]
    return max(prints.count(p) for p in prints)


def save(config: Config, context: RunContext, state: dict[str, Any]) -> None:
    """Save what a resumed run needs: on rank 0, or under FSDP2 each rank's shards."""
    context.save_state(state, every_rank=config.parallel == "fsdp")


def gradient_of(name: str, config: Config, context: RunContext, weights: Weights | None) -> Tensor:
    """The gradient of one batch, as the optimizer of a method would get it, in one float64 vector. Collective.

    Args:
        name: of the method.
        config: of the lab.
        context: of the run.
        weights: to compute it at; None: those at the start.
    """
    method = build(name, config, seed=context.seed, device=context.device)
    if weights is not None:
        method.load_weights(weights)
    sampler = BatchSampler(load_corpus().train, batch_size=config.batch_size, seq_len=config.seq_len, seed=context.seed)
    one_step(method, config, sampler, config.steps, context, None)
    return torch.cat([g.flatten().double() for _, _, g in method.gradients.items()])


def gradient_errors(config: Config, context: RunContext, weights: Weights | None) -> dict[str, float]:
    """Distance from the exact gradient, relative to it, of the methods that change it, and of ``config.schemes``."""
    exact = gradient_of("baseline", config, context, weights)
    found = {}
    for name in config.compared:
        if set(PIECES[name]) & {"A", "G"}:
            ours = gradient_of(name, config, context, weights)
            found[name] = float((ours - exact).norm() / exact.norm())
    model = Decoder(get_config(config.model), seed=context.seed).to(context.device)
    if weights is not None:
        model.load_state_dict({**model.state_dict(), **weights})
    model.lm_head.weight = model.embed_tokens.weight if model.config.tie_embeddings else model.lm_head.weight
    sampler = BatchSampler(load_corpus().train, batch_size=config.batch_size, seq_len=config.seq_len, seed=context.seed)
    batch = sampler.shard(config.steps, 0, context.dist.world_size)  # rank 0's, on every rank
    tokens, targets = (t[:SCHEME_ROWS].to(context.device) for t in batch)
    form = Format(config.codec, config.block_size)
    whole = exact_gradient(model, tokens, targets) if config.schemes else None
    for scheme in config.schemes:
        found[scheme] = gradient_quality(model, tokens, targets, scheme, form, exact=whole).relative_l2
    return found


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Train with every method; called on every rank."""
    agree(config, what="the configuration")
    parts = context.dist.world_size * config.micro_batches
    if config.batch_size % parts:
        raise LabError(f"batch_size = {config.batch_size} must be a multiple of ranks x micro_batches = {parts}")
    names = ("baseline", *config.compared)
    state = context.load_state(every_rank=config.parallel == "fsdp") or {"outcomes": {}}
    outcomes = {name: Outcome(**found) for name, found in state["outcomes"].items()}
    for index, name in enumerate(names):
        if name in outcomes:
            continue
        outcome, method = train_once(name, config, context, state, index * config.steps, len(names) * config.steps)
        outcomes[name] = outcome
        state["outcomes"][name] = asdict(outcome)
        if name == "baseline" and config.parallel == "replicated":
            state["trained"] = {n: p.detach().float().cpu().clone() for n, p in method.model.named_parameters()}
        save(config, context, state)
    start: dict[str, float] = {}
    trained: dict[str, float] = {}
    if config.parallel == "replicated":
        with context.timed("gradient errors"):
            start = gradient_errors(config, context, None)
            trained = gradient_errors(config, context, state["trained"])
    return metrics(config, context.dist.world_size, outcomes, start, trained)


def metrics(
    config: Config, world: int, outcomes: dict[str, Outcome], start: dict[str, float], trained: dict[str, float]
) -> dict[str, Any]:
    """Bytes of every method, gradient errors, losses; and the checks, with the names of those that fail."""
    shape = get_config(config.model)
    found: dict[str, Any] = {"parameters": parameter_counts(shape).total, "ranks": world}
    sizes = [p.numel() for p in _on_meta(config).parameters()]
    for name, outcome in outcomes.items():
        if outcome.held:
            found[f"{name}_bytes_held_for_backward"] = outcome.held[0]
        found[f"{name}_gradient_bytes"] = outcome.gradients[0]
        found[f"{name}_optimizer_state_bytes"] = outcome.state[0]
        if world > 1:
            form = config.form() if "G" in PIECES[name] else None
            whole = formulas.sent_bytes(sizes, form, config.min_elements, world)
            part = outcome.wire[0][1] * (world - 1) // world  # all but what a rank sends to itself
            found[f"{name}_bytes_sent_a_step"] = whole if config.parallel == "replicated" else part
    for name, error in trained.items():
        key = name.replace(" ", "_").replace("-", "_")
        found[f"{key}_gradient_error_at_start"], found[f"{key}_gradient_error"] = start[name], error
    for name, outcome in outcomes.items():
        found[f"{name}_validation_loss"] = outcome.validation
    return {**found, **checks(config, world, outcomes)}


def checks(config: Config, world: int, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """How many counts are those of the formulas, how many ranks hold equal weights, and what is wrong, by name."""
    wrong: list[str] = []

    def share(what: str, results: dict[str, list[bool]]) -> str:
        wrong.extend(f"{name} {what}" for name, each in results.items() if not all(each))
        return f"{sum(map(sum, results.values()))} of {sum(map(len, results.values()))}"

    found: dict[str, Any] = {}
    base = outcomes["baseline"].first_loss
    if config.parallel == "replicated":
        off = {n: abs(o.held[0] / o.held[1] - 1) for n, o in outcomes.items()}
        found["held_bytes_off_the_formula"] = max(off.values())
        wrong += [f"{n} held" for n, distance in off.items() if distance > HELD_TOLERANCE]
        equal = {n: [o.equal_ranks == world] for n, o in outcomes.items()}
        found["methods_with_equal_weights_on_all_ranks"] = share("weights", equal)
    for what in ("gradients", "state"):
        pairs = {n: getattr(o, what) for n, o in outcomes.items()}
        found[f"{what}_bytes_equal_to_the_formula"] = share(what, {n: [c == f] for n, (c, f) in pairs.items()})
    wire = {n: [c == f for c, f in o.wire] for n, o in outcomes.items()}
    found["wire_bytes_equal_to_the_formula"] = share("wire", wire)
    same = sum(o.first_loss == base for n, o in outcomes.items() if n != "baseline")
    found["first_losses_with_the_bits_of_the_baseline"] = f"{same} of {len(outcomes) - 1}"
    return {**found, "wrong": ", ".join(wrong) or "nothing"}


def _on_meta(config: Config) -> Decoder:
    with torch.device("meta"):
        return Decoder(get_config(config.model))


LAB = Lab("agoq", "Activations in 4 bits, gradients and optimizer in 8", Config, run, figures)

if __name__ == "__main__":
    from labs.cli import lab_main

    lab_main(LAB)
