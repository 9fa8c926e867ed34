"""From a stage's own gradients of a batch to those that its optimizer may use.

Averaged over the replicas of the stage, completed by the gradient that another stage has for a shared weight, scaled
by the global norm over all stages. What needs other stages is started at the end of the batch and waited for only
before the update, so that a whole batch may pass in between. No optimizer here, and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dist_lib.async_pipeline.channels import Inbox, Message, Outbox, Waits
from dist_lib.async_pipeline.mesh import PipelineMesh
from dist_lib.async_pipeline.numerics import accumulation_dtype, clip_factor, norm_partial, scale, total_norm
from dist_lib.async_pipeline.stages import Tie
from dist_lib.comm import Reducer, collectives
from dist_lib.comm.collectives import Pending


@dataclass
class PendingUpdate:
    """Gradients of one batch on their way to the optimizer.

    Attributes:
        batch: its number.
        gradients: averaged over micro-batches and replicas; one for each parameter, or None.
        late: positions whose other half has not arrived yet, with the inbox it comes to.
        norm: partial squared norms of all stages, under way; None without clipping.
    """

    batch: int
    gradients: list[Tensor | None]
    late: list[tuple[int, Inbox]] = field(default_factory=list)
    norm: Pending | Tensor | None = None


class GradientExchange:
    """The exchanges of one stage.

    Args:
        mesh: ranks and groups.
        waits: the clock.
        parameters: (name, parameter) of this stage, in the order of its gradients.
        ties: weights shared between stages.
        reducer: averages over the replicas of the stage.
        clip_norm: largest global norm, or None.

    Raises:
        ValueError: a tie that names no trained parameter of this stage, or stages in the wrong order.
    """

    def __init__(
        self,
        mesh: PipelineMesh,
        waits: Waits,
        parameters: Sequence[tuple[str, nn.Parameter]],
        ties: Sequence[Tie],
        reducer: Reducer,
        clip_norm: float | None,
    ) -> None:
        self._mesh, self._waits, self._reducer, self._clip_norm = mesh, waits, reducer, clip_norm
        self._parameters = [p for _, p in parameters]
        self._first: list[tuple[int, Inbox, Outbox]] = []
        self._last: list[tuple[int, Inbox, Outbox]] = []
        names = [name for name, _ in parameters]
        for tie in ties:
            if not 0 <= tie.first < tie.last < mesh.stages:
                raise ValueError(f"{tie}: need 0 <= first < last < {mesh.stages} stages")
            if mesh.stage not in (tie.first, tie.last):
                continue
            mine, other = tie.first_name, tie.last
            if mesh.stage == tie.last:
                mine, other = tie.last_name, tie.first
            if mine not in names:
                raise ValueError(f"{tie}: stage {mesh.stage} has no trained parameter {mine!r}; it has {names}")
            index, rank = names.index(mine), mesh.rank_of(other)
            weight = self._parameters[index]
            message = Message(tuple(weight.shape), accumulation_dtype(weight.dtype))
            inbox = Inbox(rank, mesh, "across", message, waits, "tied gradients")
            ends = (index, inbox, Outbox(rank, mesh, "across", 2, waits, "tied gradients"))
            (self._first if mesh.stage == tie.first else self._last).append(ends)

    def share_weights(self) -> None:
        """Give all copies of a weight the value of replica 0, and of the first stage that holds it."""
        if self._mesh.peers is not None:
            for parameter in self._parameters:
                collectives.broadcast(parameter.data, self._mesh.stage * self._mesh.replicas, group=self._mesh.peers)
        for index, _, outbox in self._first:
            outbox.put(self._parameters[index].detach())
            outbox.flush()
        for index, inbox, _ in self._last:
            weight = self._parameters[index]
            raw = Inbox(inbox.src, self._mesh, "across", Message.of(weight), self._waits, "tied weights")
            raw.expect(1)
            weight.data.copy_(raw.take("at the start"))

    def expect(self) -> None:
        """Say that one more batch will certainly be done."""
        for _, inbox, _ in (*self._first, *self._last):
            inbox.expect(1)

    def start(self, batch: int, gradients: list[Tensor | None]) -> PendingUpdate:
        """Begin the exchange of a batch's gradients; blocks for the replicas of this stage only.

        Args:
            batch: its number, for messages.
            gradients: averaged over this replica's micro-batches; completed and scaled in place.
        """
        self._average_over_replicas(gradients)
        update = PendingUpdate(batch, gradients)
        for index, _, outbox in (*self._first, *self._last):
            gradient = gradients[index]
            if gradient is None:
                weight = self._parameters[index]
                gradient = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
                gradients[index] = gradient
            outbox.put(gradient.clone())
        for index, inbox, _ in self._first:  # the other stage was through with this batch before
            self._add(gradients, index, inbox, batch)
        update.late = [(index, inbox) for index, inbox, _ in self._last]
        if self._clip_norm is not None:
            update.norm = self._start_norm(gradients)
        return update

    def finish(self, update: PendingUpdate) -> list[Tensor | None]:
        """Wait for what is still under way; returns the gradients that the optimizer uses."""
        for index, inbox in update.late:
            self._add(update.gradients, index, inbox, update.batch)
        if self._clip_norm is not None and update.norm is not None:
            partials = update.norm
            if isinstance(partials, Pending):
                partials = self._waits.wait(partials, "norm", f"the gradient norm of batch {update.batch}")
            scale(update.gradients, clip_factor(total_norm(list(partials)), self._clip_norm))
        return update.gradients

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for _, _, outbox in (*self._first, *self._last):
            outbox.flush()

    def _add(self, gradients: list[Tensor | None], index: int, inbox: Inbox, batch: int) -> None:
        other, mine = inbox.take(f"of batch {batch}"), gradients[index]
        if mine is not None:
            mine.add_(other)

    def _start_norm(self, gradients: list[Tensor | None]) -> Pending | Tensor:
        """Partials of all stages: each writes its own place of a vector of zeros, so that their sum is exact."""
        theirs = {index for index, _, _ in self._last}  # counted by the first stage that holds them
        mine = norm_partial(g for index, g in enumerate(gradients) if index not in theirs)
        partials = torch.zeros(self._mesh.stages, device=self._mesh.device)
        partials[self._mesh.stage] = mine
        if self._mesh.stages == 1:
            return partials
        return collectives.all_reduce(partials, group=self._mesh.pipeline, async_op=True)

    def _average_over_replicas(self, gradients: list[Tensor | None]) -> None:
        """Through the reducer, one flat tensor a dtype; a gradient that some replicas lack counts as 0 there."""
        group = self._mesh.peers
        if group is None:
            return
        has = torch.tensor([float(g is not None) for g in gradients], device=self._mesh.device)
        collectives.all_reduce(has, op="max", group=group)
        there = [index for index, flag in enumerate(has.tolist()) if flag]
        for index in there:
            if gradients[index] is None:
                weight = self._parameters[index]
                gradients[index] = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for dtype in dict.fromkeys(g.dtype for g in gradients if g is not None):
            alike = [g for g in gradients if g is not None and g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in alike])
            self._reducer.all_reduce(flat, average=True, group=group)
            for gradient, part in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
                gradient.copy_(part.view_as(gradient))
