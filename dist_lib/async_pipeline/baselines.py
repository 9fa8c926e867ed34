"""PyTorch's own flushed pipeline behind the interface of ours, to compare results and times in one run.

``torch.distributed.pipelining`` executes 1F1B or GPipe; micro-batches, averaging over replicas, shared weights and
clipping are those of :class:`~.runtime.Pipeline` with a delay of 0, whose results it gives up to rounding. It is a
baseline: no delay, no error feedback, no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dist_lib.async_pipeline import numerics
from dist_lib.async_pipeline.channels import Waits
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.exchange import GradientExchange
from dist_lib.async_pipeline.mesh import PipelineMesh
from dist_lib.async_pipeline.runtime import Loss, MakeOptimizer, MakeScheduler
from dist_lib.async_pipeline.stages import Tie, ties_of
from dist_lib.async_pipeline.stream import Batch, BatchStream
from dist_lib.comm import ExactReducer, Reducer, agree, collectives


class FlushedBaseline:
    """One stage of a synchronous pipeline run by ``torch.distributed.pipelining``.

    Args:
        stage: this rank's module, or those of all stages.
        loss_fn, make_optimizer, mesh, make_scheduler, reducer, ties: as for :class:`~.runtime.Pipeline`.
        config: with ``delay=0`` and without error feedback; 1F1B needs at least as many micro-batches as stages.
        schedule: ``"1f1b"`` or ``"gpipe"``.

    Raises:
        AgreementError: on every rank, if configurations differ.
        ValueError: on every rank, a configuration or schedule that this baseline does not have.

    Attributes:
        module, optimizer, scheduler, step: as of :class:`~.runtime.Pipeline`.
    """

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        *,
        loss_fn: Loss,
        make_optimizer: MakeOptimizer,
        config: AsyncConfig,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        mesh: PipelineMesh | None = None,
        make_scheduler: MakeScheduler | None = None,
        reducer: Reducer | None = None,
        ties: Sequence[Tie] | None = None,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self.mesh = mesh = PipelineMesh(timeout_s=config.timeout_s) if mesh is None else mesh
        modules = [stage] if isinstance(stage, nn.Module) else list(stage)
        shared = ties_of(modules) if ties is None else tuple(ties)
        agree([config, shared, schedule], what="the baseline's configuration", group=mesh.world)
        if config.delay != 0 or config.error_feedback:
            raise ValueError("this baseline is synchronous: set delay=0 and error_feedback=False")
        kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
        if schedule not in kinds:
            raise ValueError(f"schedule {schedule!r}: this baseline has {sorted(kinds)}")
        if schedule == "1f1b" and config.micro_batches < mesh.stages:
            raise ValueError(f"micro_batches = {config.micro_batches}; 1F1B needs at least {mesh.stages} here")
        self.config, self.step = config, 0
        self.module = modules[mesh.stage % len(modules)]
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        problem: Exception | None = None
        try:
            self.optimizer = make_optimizer(named) if named else None
            if self.optimizer is not None and make_scheduler is not None:
                self.scheduler = make_scheduler(self.optimizer)
            waits, reduce = Waits(mesh), reducer or ExactReducer()
            self._exchange = GradientExchange(mesh, waits, named, shared, reduce, config.clip_norm)
        except Exception as error:  # told to the others by settle, and raised again there
            problem = error
        mesh.settle(problem)
        self._exchange.share_weights()
        torch_stage = PipelineStage(self.module, mesh.stage, mesh.stages, mesh.device, group=mesh.pipeline)
        self._schedule = kinds[schedule](torch_stage, config.micro_batches, loss_fn=loss_fn)

    def run(self, batches: Iterable[Batch]) -> list[float]:
        """Train on batches; see :meth:`~.runtime.Pipeline.run`, whose rules for batches and errors hold here too."""
        problem: Exception | None = None
        try:
            stream = BatchStream(batches, micro_batches=self.config.micro_batches, replicas=self.mesh.replicas)
        except Exception as error:
            problem = error
        self.mesh.settle(problem)
        agree([stream.plan, self.step], what="the batches (number, shapes) and their start", group=self.mesh.world)
        losses = []
        while stream.waiting:
            losses.append(self._train(*stream.take()))
        shared = self._share(losses)
        if stream.problem is not None:
            stream.problem.losses = shared
            raise stream.problem
        return shared

    def _train(self, inputs: Tensor, targets: Tensor) -> float:
        mesh, found = self.mesh, list[Tensor]()
        mine = [t.chunk(mesh.replicas)[mesh.replica].to(mesh.device) for t in (inputs, targets)]
        self._exchange.expect()
        args = (mine[0],) if mesh.stage == 0 else ()
        if mesh.stage == mesh.stages - 1:
            self._schedule.step(*args, target=mine[1], losses=found)
        else:
            self._schedule.step(*args)
        gradients: list[Tensor | None] = [
            None if p.grad is None else p.grad.to(numerics.accumulation_dtype(p.dtype)) for p in self._parameters
        ]
        update = self._exchange.start(self.step, gradients)
        gradients = self._exchange.finish(update)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self._exchange.flush()
        self.step += 1
        return numerics.mean_loss([loss.item() for loss in found]) if found else 0.0

    def _share(self, losses: list[float]) -> list[float]:
        row = torch.tensor(losses, dtype=torch.float64, device=self.mesh.device)
        last = self.mesh.stages - 1
        if self.mesh.stage == last and self.mesh.peers is not None:
            row = collectives.ordered_sum(row, group=self.mesh.peers) / self.mesh.replicas
        collectives.broadcast(row, self.mesh.rank_of(last), group=self.mesh.pipeline)
        shared: list[float] = row.tolist()
        return shared
