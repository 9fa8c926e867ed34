"""The training step that the labs share: gradients of the global batch on any number of ranks, counted and timed.

The global batch is cut into shards. A rank works through its own shards one after the other and the ranks then add
what they have, so one process with four shards does exactly what four processes with one shard each do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dist_lib.comm import CommCounter, Reducer
from dist_lib.models import Decoder, SavedTensorCounter
from dist_lib.tasks import BatchSampler, TextCorpus
from labs.framework import RunContext


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of every lab that trains a decoder on the corpus with :class:`DataParallelStep`.

    Attributes:
        model: name of a decoder configuration.
        steps: optimizer steps.
        batch_size: sequences in the global batch.
        seq_len: tokens in a sequence.
        weight_decay: of every optimizer.
        shards: pieces of the global batch; 0 is one for each rank; a multiple of the ranks otherwise.
        ordered: add gradients in rank order (bits of the single-process twin) instead of the backend's order.
        save_every: steps between saved states; 0 never saves.

    Raises:
        ValueError: a setting out of its range, named with its value.
    """

    model: str
    steps: int
    batch_size: int
    seq_len: int
    weight_decay: float = 0.1
    shards: int = 0
    ordered: bool = True
    save_every: int = 50

    def __post_init__(self) -> None:
        self.require(steps=1, batch_size=1, seq_len=1, weight_decay=0, shards=0, save_every=0)

    def require(self, *, above: Sequence[str] = (), **least: float) -> None:
        """Refuse a setting below its least value, or one of ``above`` that is not above 0."""
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {value}")
        for name in above:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")


@dataclass
class StepCount:
    """What one step was counted to need on this rank."""

    comm_bytes: int = 0
    comm_calls: int = 0
    held_bytes: int = 0
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Cut a list of tensors into runs of at most ``bucket_bytes`` (a larger tensor is a run of its own)."""
    runs: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        if not runs or filled + tensor.nbytes > bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(tensor)
        filled += tensor.nbytes
    return runs


def sum_gradients(gradients: Sequence[Tensor], reducer: Reducer, bucket_bytes: int = 25 * 2**20) -> None:
    """Add gradients over all ranks, in place, a flat bucket at a time."""
    for run in buckets(gradients, bucket_bytes):
        flat = torch.cat([g.flatten() for g in run])
        reducer.all_reduce(flat, average=False)
        for gradient, part in zip(run, flat.split([g.numel() for g in run]), strict=True):
            gradient.copy_(part.view_as(gradient))


def shard_range(rank: int, world_size: int, shards: int) -> range:
    """The shards of one rank: contiguous, in rank order.

    Raises:
        ValueError: fewer shards than ranks, or a number that the ranks do not divide.
    """
    if shards < world_size or shards % world_size:
        raise ValueError(f"shards = {shards} must be a multiple of the {world_size} ranks")
    each = shards // world_size
    return range(rank * each, (rank + 1) * each)


def payload_bytes_per_step(parameters: int, world_size: int) -> int:
    """Bytes that a rank hands to collectives in a step: its float32 gradients and the loss; nothing when alone.

    The same for an ordered sum (a gather) and an unordered one (an all-reduce); what a link carries differs, see
    :meth:`dist_lib.comm.NetworkModel.wire_bytes`.
    """
    return 4 * (parameters + 1) if world_size > 1 else 0


class DataParallelStep:
    """Computes the gradient of the mean loss over the global batch, the same on every rank.

    Args:
        model: with the same weights on every rank.
        sampler: global batches.
        context: of the run.
        reducer: how gradients are added.
        shards: pieces of the global batch; 0 means one for each rank.
    """

    def __init__(
        self, model: Decoder, sampler: BatchSampler, context: RunContext, reducer: Reducer, *, shards: int = 0
    ) -> None:
        self.model, self.sampler, self.context, self.reducer = model, sampler, context, reducer
        self.shards = shards or context.dist.world_size
        self.mine = shard_range(context.dist.rank, context.dist.world_size, self.shards)
        self.count = StepCount()

    @property
    def rows_of_counted_shard(self) -> int:
        """Sequences in this rank's first shard, the one whose held bytes are counted."""
        first, rows = self.mine[0], self.sampler.batch_size
        return (first + 1) * rows // self.shards - first * rows // self.shards

    def __call__(self, step: int, *, counted: bool = False) -> float:
        """Fill ``.grad`` of every parameter for one step; return the global mean loss.

        Args:
            step: which batch.
            counted: also count bytes into :attr:`count`.
        """
        model, context = self.model, self.context
        model.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), device=context.device)
        held = SavedTensorCounter(model) if counted else None
        for shard in self.mine:
            tokens, targets = (t.to(context.device) for t in self.sampler.shard(step, shard, self.shards))
            weight = len(tokens) / self.sampler.batch_size
            with context.timed("forward"), held or nullcontext():
                loss = model.loss(tokens, targets) * weight
            if held is not None:
                self.count.held_bytes, held = held.bytes, None  # of one shard: the next reuses the memory
            with context.timed("backward"):
                loss.backward()
            loss_sum += loss.detach()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        with context.timed("communication"), CommCounter() if counted else nullcontext() as counter:
            if context.dist.world_size > 1:
                sum_gradients(gradients, self.reducer)
                self.reducer.all_reduce(loss_sum, average=False)
        if counter is not None:
            self.count.comm_bytes, self.count.comm_calls = counter.bytes(), counter.count()
            self.count.collectives = counter.table()
        return float(loss_sum)


@torch.no_grad()
def validation_loss(model: Decoder, corpus: TextCorpus, *, seq_len: int, rows: int = 32) -> float:
    """Mean loss on fixed windows of held-out text, nats a byte."""
    device = next(model.parameters()).device
    sampler = BatchSampler(corpus.val, batch_size=rows, seq_len=seq_len, seed=12345)
    tokens, targets = (t.to(device) for t in sampler.batch(0))
    return float(model.loss(tokens, targets))


def train(
    step_fn: DataParallelStep,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    steps: int,
    save_every: int = 0,
    before_step: Callable[[int], None] | None = None,
) -> tuple[int, float]:
    """Train from saved state or from the start; return the number of steps done here and the last loss.

    Args:
        step_fn: computes gradients.
        optimizers: stepped in order.
        steps: of the whole run.
        save_every: save state after every so many steps; 0 never saves.
        before_step: called with the step, for learning-rate schedules.
    """
    context, model, opts = step_fn.context, step_fn.model, list(optimizers)
    first, loss = 0, float("nan")
    state = context.load_state()
    if state is not None:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(opts, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, loss = int(state["step"]), float(state["loss"])
        step_fn.count = StepCount(**state["count"])  # for a run that has nothing left to do
    for step in range(first, steps):
        if before_step is not None:
            before_step(step)
        loss = step_fn(step, counted=step == first)
        with context.timed("optimizer"):
            for optimizer in opts:
                optimizer.step()
        context.log_step(step + 1, steps, loss=loss)
        if save_every and (step + 1) % save_every == 0:
            context.save_state(_state(model, opts, step + 1, loss, step_fn.count))
    return steps - first, loss


def _state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int, loss: float, count: StepCount
) -> dict[str, Any]:
    saved = [o.state_dict() for o in optimizers]
    return {"model": model.state_dict(), "optimizers": saved, "step": step, "loss": loss, "count": asdict(count)}
