"""A pipeline that never drains: 1F1B with two weight versions and a delay of one update (PipeDream-2BW).

Every rank runs one stage. It issues a forward whenever fewer than p - s micro-batches are in flight and the version
that the batch needs has been, or can be, made; otherwise a backward. With a delay of one that is 1F1B without a flush
(the order of PipeDream-2BW, arXiv 2006.09503); with a delay of zero the same rule gives the flushed 1F1B. All
micro-batches of batch g run forward and backward on version max(g - 1, 0), on every stage and at every depth; the
update goes to the newest weights, out of place, just before the first forward that needs it. One Step Gradient Delay,
arXiv 2606.30634, studies what this does to training.

The arithmetic is in ``numerics``, the weights in ``versions``, the messages in ``channels``: here is the order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dist_lib.async_pipeline import checkpoint, numerics
from dist_lib.async_pipeline.channels import Inbox, Message, Outbox, Waits, send_description
from dist_lib.async_pipeline.config import AsyncConfig, check_micro_batches
from dist_lib.async_pipeline.error_feedback import configured
from dist_lib.async_pipeline.exchange import GradientExchange, PendingUpdate
from dist_lib.async_pipeline.mesh import PipelineError, PipelineMesh
from dist_lib.async_pipeline.schedules import Action, Event
from dist_lib.async_pipeline.stages import Tie, ties_of
from dist_lib.async_pipeline.stream import Batch, BatchStream, Form
from dist_lib.async_pipeline.versions import WeightVersions
from dist_lib.comm import ExactReducer, Reducer, agree, collectives

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
OnBatch = Callable[[int, float | None], None]
Kind = Literal["forward", "backward", "update"]


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward."""

    batch: int
    index: int
    version: int
    received: Tensor
    output: Tensor


class Pipeline:
    """One stage of a pipeline; make and run it on all ranks alike.

    Replicas and tied copies start from the weights of replica 0 and of the first stage. Memory of a stage: two versions
    of its weights (one with a delay of 0), optimizer state, p - s micro-batches of activations, and gradients of up to
    two batches, because those of one batch wait while the next accumulates.

    Args:
        stage: this rank's module, or those of all stages, of which this rank takes its own. One tensor in and out.
        loss_fn: ``loss_fn(output, targets)``, a mean over rows; used by the last stage.
        make_optimizer: called with this stage's trained parameters, by name; not called if there are none.
        config: the same on all ranks.
        mesh: default: all ranks are stages of one pipeline.
        make_scheduler: called with the optimizer; stepped once an update.
        reducer: averages gradients over the replicas of a stage; default exact.
        ties: weights that two stages hold; default: what the stage says (``ties_of``).
        record_events: keep what :attr:`events` gives; on a GPU this waits for the device after every action.

    Raises:
        AgreementError: on every rank, if configurations, meshes or ties differ.
        ValueError: on every rank, too few micro-batches for the number of stages, or what the optimizer refuses.
        PipelineError: another rank could not be set up.

    Attributes:
        step: batches trained on so far, which is the version of the newest weights.
        config, mesh, module, optimizer, scheduler: as given or made; ``optimizer`` is None if nothing is trained.
        versions: the weights of this stage.
        events: what this stage did, in seconds since all ranks were ready; of the last run, empty unless recorded.
    """

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        *,
        loss_fn: Loss,
        make_optimizer: MakeOptimizer,
        config: AsyncConfig,
        mesh: PipelineMesh | None = None,
        make_scheduler: MakeScheduler | None = None,
        reducer: Reducer | None = None,
        ties: Sequence[Tie] | None = None,
        record_events: bool = False,
    ) -> None:
        self.mesh = mesh = PipelineMesh(timeout_s=config.timeout_s) if mesh is None else mesh
        modules = [stage] if isinstance(stage, nn.Module) else list(stage)
        shared = ties_of(modules) if ties is None else tuple(ties)
        agree([config, shared, make_scheduler is None], what="the pipeline's configuration", group=mesh.world)
        check_micro_batches(config, mesh.stages)
        self.config, self.loss_fn, self.record_events = config, loss_fn, record_events
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self.step = 0
        self.events: list[Event] = []
        self._waits, self._broken = Waits(mesh), False
        self._form: Form | None = None
        self._incoming: Message | None = None
        self._outgoing: Message | None = None
        problem: Exception | None = None
        try:
            self._set_up(modules, shared, make_optimizer, make_scheduler, reducer)
        except Exception as error:  # told to the others by settle, and raised again there
            problem = error
        mesh.settle(problem)
        self._exchange.share_weights()
        self.versions = WeightVersions(self.module, 1 + int(config.delay == 1))

    def _set_up(
        self,
        modules: list[nn.Module],
        ties: Sequence[Tie],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        reducer: Reducer | None,
    ) -> None:
        """What can fail on one rank alone."""
        mesh, config = self.mesh, self.config
        if len(modules) not in (1, mesh.stages):
            raise ValueError(f"{len(modules)} modules for {mesh.stages} stages: give this rank's own, or one a stage")
        if mesh.timeout_s != config.timeout_s:
            raise ValueError(
                f"the mesh has a timeout of {mesh.timeout_s:g} s, the configuration {config.timeout_s:g} s"
            )
        self.module = modules[mesh.stage % len(modules)]
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        if named:
            self.optimizer = configured(make_optimizer(named), config)
            self.scheduler = make_scheduler(self.optimizer) if make_scheduler is not None else None
        self._exchange = GradientExchange(mesh, self._waits, named, ties, reducer or ExactReducer(), config.clip_norm)

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds this rank was blocked in the last run, by reason (activations, gradients, norm, sends, ties)."""
        return dict(self._waits.seconds)

    @property
    def is_first(self) -> bool:
        """Whether this is the stage that takes the inputs."""
        return self.mesh.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that computes the loss."""
        return self.mesh.stage == self.mesh.stages - 1

    def run(self, batches: Iterable[Batch], *, on_batch: OnBatch | None = None) -> list[float]:
        """Train on batches, then drain: all updates are made when this returns.

        Args:
            batches: (inputs, targets), the same on every rank, with the rows of all replicas. All must have one shape
                and rows that micro-batches times replicas divide. A list or tuple is checked before anything is sent;
                of anything else each batch is checked before its first row is sent, the batches before an unfit
                one are finished, and then every rank raises.
            on_batch: called on every stage when it has finished the backwards of a batch, with the batch's number
                and, on the last stage, the loss of this replica.

        Returns:
            On every rank, for each batch the mean loss over micro-batches and replicas, at the version used.

        Raises:
            BatchError: on every rank, an unfit batch; its ``losses`` are of the batches before it.
            AgreementError: on every rank, lists of different lengths or shapes.
            PipelineError: another rank failed or did not answer in time. The pipeline cannot be used any more.
        """
        if self._broken:
            raise PipelineError("this pipeline stopped in the middle of a run: make it anew and load a checkpoint")
        stream = self._agree_on(batches)
        self._waits.seconds.clear()
        self.events = []
        self._broken = True
        losses: list[float] = []
        if stream.form is not None:
            if stream.form != self._form:
                self._agree_on_messages(stream)
            losses = _Run(self, stream, on_batch).go()
        self._broken = False
        if stream.problem is not None:
            stream.problem.losses = losses
            raise stream.problem
        return losses

    def state_dict(self) -> dict[str, Any]:
        """All that the next batch of this stage depends on; see ``checkpoint.stage_state``.

        Raises:
            PipelineError: the last run stopped in the middle.
        """
        if self._broken:
            raise PipelineError("this pipeline stopped in the middle of a run: its state is of no single batch")
        return checkpoint.stage_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, on all ranks; the data must go on at batch :attr:`step`.

        Raises:
            ValueError: it belongs to another stage, configuration or model.
        """
        checkpoint.load_stage_state(self, state)

    def _agree_on(self, batches: Iterable[Batch]) -> BatchStream:
        problem: Exception | None = None
        try:
            stream = BatchStream(batches, micro_batches=self.config.micro_batches, replicas=self.mesh.replicas)
        except Exception as error:
            problem = error
        self.mesh.settle(problem)
        agree([stream.plan, self.step], what="the batches (number, shapes) and their start", group=self.mesh.world)
        return stream

    def _agree_on_messages(self, stream: BatchStream) -> None:
        """One forward without gradients through all stages, on zeros after the first, tells every stage its shapes."""
        mesh = self.mesh
        problem: Exception | None = None
        incoming = outgoing = None
        if not self.is_first:
            incoming = Message.received(mesh.rank_of(mesh.stage - 1), mesh.down, mesh.device)
        if self.is_first or incoming is not None:
            try:
                outgoing = self._trial(stream, incoming)
            except Exception as error:
                problem = error
        if not self.is_last:
            send_description(outgoing, mesh.rank_of(mesh.stage + 1), mesh.down, mesh.device)
            back = Message.received(mesh.rank_of(mesh.stage + 1), mesh.up, mesh.device)
            if problem is None and back != outgoing:
                problem = PipelineError(f"{mesh.place} would send {outgoing}, but the next stage expects {back}")
        if not self.is_first:
            send_description(incoming, mesh.rank_of(mesh.stage - 1), mesh.up, mesh.device)
        mesh.settle(problem)
        self._form, self._incoming, self._outgoing = stream.form, incoming, outgoing

    @torch.no_grad()
    def _trial(self, stream: BatchStream, incoming: Message | None) -> Message:
        inputs, targets = (t.to(self.mesh.device) for t in stream.first_micro_batch(self.mesh.replica))
        x = inputs if incoming is None else incoming.empty(self.mesh.device).zero_()
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            output = functional_call(self.module, buffers, (x,))
            if self.is_last and tuple(self.loss_fn(output, targets).shape) != ():
                raise ValueError("loss_fn must return a scalar, the mean over the rows of a micro-batch")
        return Message.of(output)


class _Run:
    """One run from the first forward to the last update: the state that is gone after a drain."""

    def __init__(self, pipeline: Pipeline, stream: BatchStream, on_batch: OnBatch | None) -> None:
        self.p, self.stream, self.on_batch = pipeline, stream, on_batch
        self.m, self.delay = pipeline.config.micro_batches, int(pipeline.config.delay == 1)
        mesh, waits = pipeline.mesh, pipeline._waits
        self.room = mesh.stages - mesh.stage
        self.flight: deque[_InFlight] = deque()
        self.updates: deque[PendingUpdate] = deque()
        self.first = self.started = self.finished = pipeline.step  # numbers of batches
        self.parts: deque[tuple[Tensor, Tensor]] = deque()
        self.sums: list[Tensor | None] = [None] * len(pipeline.versions.names)
        self.losses: list[list[Tensor]] = []
        self.activations: Inbox | None = None
        self.gradients: Inbox | None = None
        self.to_next: Outbox | None = None
        self.to_previous: Outbox | None = None
        if pipeline._incoming is not None:
            previous = mesh.rank_of(mesh.stage - 1)
            self.activations = Inbox(previous, mesh, "down", pipeline._incoming, waits, "activations")
            self.to_previous = Outbox(previous, mesh, "up", self.room + 1, waits, "gradients")
        if not pipeline.is_last and pipeline._outgoing is not None:
            following = mesh.rank_of(mesh.stage + 1)
            self.gradients = Inbox(following, mesh, "up", pipeline._outgoing, waits, "gradients")
            self.to_next = Outbox(following, mesh, "down", self.room + 1, waits, "activations")
        self.begin = 0.0

    def go(self) -> list[float]:
        """Run all batches of the stream and drain."""
        if self.p.record_events:
            collectives.barrier(group=self.p.mesh.world)
            self.begin = time.perf_counter()
        self._expect()
        while True:
            if self._may_forward():
                self._forward()
            elif self.flight:
                self._backward()
            else:
                break
        self._make_version(self.finished)
        for outbox in (self.to_next, self.to_previous):
            if outbox is not None:
                outbox.flush()
        self.p._exchange.flush()
        return self._share_losses()

    def _expect(self) -> None:
        """One more batch is sure to come: let its messages be received."""
        if self.stream.waiting:
            for inbox in (self.activations, self.gradients):
                if inbox is not None:
                    inbox.expect(self.m)
            self.p._exchange.expect()

    def _may_forward(self) -> bool:
        if len(self.flight) >= self.room:
            return False
        if self.parts:
            return True
        return self.stream.waiting and self.started - self.delay <= self.finished

    def _next_part(self) -> tuple[Tensor, Tensor]:
        if not self.parts:
            inputs, targets = self.stream.take()
            replica = self.p.mesh.replica
            cut = (self.stream.micro_batches(t, replica) for t in (inputs, targets))
            self.parts.extend(zip(*cut, strict=True))
            self.started += 1
            self._expect()
        return self.parts.popleft()

    def _forward(self) -> None:
        inputs, targets = self._next_part()
        batch, index = self.started - 1, self.m - 1 - len(self.parts)
        version = max(batch - self.delay, 0)
        self._make_version(version)
        device = self.p.mesh.device
        if self.activations is None:
            x = inputs.to(device, non_blocking=True)
        else:
            x = self.activations.take(f"of batch {batch}, micro-batch {index}").requires_grad_()
        begin = time.perf_counter()
        output = self.p.versions.forward(version, x)
        if self.p.is_last:
            output = self.p.loss_fn(output, targets.to(device, non_blocking=True))
            if index == 0:
                self.losses.append([])
            self.losses[-1].append(output.detach())
        elif Message.of(output) != self.p._outgoing:
            raise PipelineError(
                f"{self.p.mesh.place} made {Message.of(output)} in batch {batch}, but {self.p._outgoing} was agreed: "
                "the shape of a message must not change"
            )
        self._record("forward", begin, batch, index, version)
        if self.to_next is not None:
            self.to_next.put(output)
        self.flight.append(_InFlight(batch, index, version, x, output))

    def _backward(self) -> None:
        part = self.flight.popleft()
        gradient = None
        if self.gradients is not None:
            gradient = self.gradients.take(f"of batch {part.batch}, micro-batch {part.index}")
        begin = time.perf_counter()
        if part.output.requires_grad:
            torch.autograd.backward(part.output, gradient)
        found = self.p.versions.release(part.version)
        if self.to_previous is not None:
            passed = part.received.grad
            self.to_previous.put(torch.zeros_like(part.received) if passed is None else passed)
        numerics.accumulate(self.sums, found)
        last = part.index == self.m - 1
        if last:
            numerics.average(self.sums, self.m)
        self._record("backward", begin, part.batch, part.index, part.version)
        if last:
            self.updates.append(self.p._exchange.start(part.batch, self.sums))
            self.sums = [None] * len(self.sums)
            self.finished += 1
            if self.on_batch is not None:
                self.on_batch(part.batch, self._loss(-1) if self.p.is_last else None)

    def _make_version(self, version: int) -> None:
        """Make the updates up to a version, each just now because somebody needs it."""
        while self.p.versions.newest < version:
            if not self.updates:
                raise PipelineError(
                    f"{self.p.mesh.place} needs version {version} of the weights, but batch "
                    f"{self.p.versions.newest} has not been finished: the order of the pipeline is wrong"
                )
            update = self.updates.popleft()
            gradients = self.p._exchange.finish(update)
            begin = time.perf_counter()
            self.p.versions.advance(gradients, self._step_optimizer)
            self.p.step += 1
            self._record("update", begin, update.batch, 0, self.p.versions.newest)

    def _step_optimizer(self) -> None:
        if self.p.optimizer is not None:
            self.p.optimizer.step()
        if self.p.scheduler is not None:
            self.p.scheduler.step()

    def _record(self, kind: Kind, begin: float, batch: int, index: int, version: int) -> None:
        if not self.p.record_events:
            return
        if self.p.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.p.mesh.device)
        end = time.perf_counter()
        stage = self.p.mesh.stage
        action = Action(kind=kind, stage=stage, batch=batch, micro_batch=index, version=version)
        self.p.events.append(Event(stage=stage, action=action, start_s=begin - self.begin, end_s=end - self.begin))

    def _loss(self, position: int) -> float:
        return numerics.mean_loss([loss.item() for loss in self.losses[position]])

    def _share_losses(self) -> list[float]:
        """Mean over replicas, in their order, from the last stage to all."""
        mesh = self.p.mesh
        row = torch.zeros(self.finished - self.first, dtype=torch.float64, device=mesh.device)
        if self.p.is_last:
            values = [self._loss(position) for position in range(len(self.losses))]
            row = torch.tensor(values, dtype=torch.float64, device=mesh.device)
            if mesh.peers is not None:
                row = collectives.ordered_sum(row, group=mesh.peers) / mesh.replicas
        collectives.broadcast(row, mesh.rank_of(mesh.stages - 1), group=mesh.pipeline)
        shared: list[float] = row.tolist()
        return shared
