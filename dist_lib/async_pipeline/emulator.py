"""Training with delayed gradients in one process: the oracle of the pipeline runtime, and a tool to study optimizers.

:class:`DelayedTrainer` keeps the versions of the weights that a pipeline would have live, evaluates the gradient of a
batch at the version that the schedule would use, and applies it to the newest weights. Its arithmetic is that of the
runtime, operation by operation, so that both end at the same bits. It knows no schedule and no time: versions follow
the number of the batch alone. It moves nothing between devices and does not save random states: with dropout, runs are
not the runtime's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dist_lib.async_pipeline import numerics
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.error_feedback import ErrorFeedback, configured
from dist_lib.async_pipeline.mitigations import WeightPrediction
from dist_lib.async_pipeline.stages import Tie, ties_of

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def version_of(batch: int, delay: int, *, sync_updates: int = 0) -> int:
    """Which version of the weights the gradient of a batch is taken at: ``max(batch - delay, 0)``.

    Args:
        batch: number of the batch, from 0; it makes version ``batch + 1``.
        delay: of the stage, in updates.
        sync_updates: updates made without delay first; the delayed pipeline then starts empty, as at batch 0.
    """
    return batch if batch < sync_updates else max(batch - delay, sync_updates)


class _Stage:
    """A stage's module, its optimizer, and the old versions of its trained parameters."""

    def __init__(self, module: nn.Module, delay: int, config: AsyncConfig, make: MakeOptimizer) -> None:
        self.module, self.delay = module, delay
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.versions: dict[int, list[Tensor]] = {}
        self.optimizer = configured(make(named), config) if named else None
        self.scheduler: LRScheduler | None = None

    def leaves(self, version: int, newest: int, prediction: WeightPrediction | None) -> list[Tensor]:
        """The parameters of a version as leaves of a new graph."""
        weights = self.parameters if version == newest else self.versions[version]
        if prediction is not None and version < newest and version - 1 in self.versions:
            before = self.versions[version - 1]
            predicted = [
                prediction.predict(w.detach(), b, newest - version) for w, b in zip(weights, before, strict=True)
            ]
            return [w.requires_grad_() for w in predicted]
        return [w.detach().requires_grad_() for w in weights]

    def forward(self, leaves: list[Tensor], x: Tensor) -> Tensor:
        """Output on the given parameters; others and buffers are the module's own."""
        out: Tensor = functional_call(self.module, dict(zip(self.names, leaves, strict=True)), (x,))
        return out

    def update(self, gradients: Sequence[Tensor | None], newest: int, oldest: int) -> None:
        """Make version ``newest + 1``; keep old versions from ``oldest`` on."""
        if oldest <= newest:
            self.versions[newest] = [p.detach().clone() for p in self.parameters]
        self.versions = {v: w for v, w in self.versions.items() if v >= oldest}
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()


class DelayedTrainer:
    """Train a model, cut into stages, with gradients that are some updates old.

    For batch g and a stage of delay d the gradient is taken at version ``max(g - d, 0)`` and makes version ``g + 1``
    from version g. One optimizer a stage sees each update once; its state is never rewound.

    Args:
        stages: modules, one tensor in and one out, whose composition is the model; the first gets the inputs.
        loss_fn: ``loss_fn(output, targets)``, a mean over rows.
        make_optimizer: called once a stage with its trained parameters, by name. It may return a wrapper, such as
            :class:`~dist_lib.async_pipeline.mitigations.DCASGD`.
        config: delay, micro-batches, clipping, error feedback.
        make_scheduler: called once a stage with its optimizer; stepped once an update.
        ties: weights that two stages hold; default: what the stages say (``ties_of``). The averaged
            gradients of both are added before the update.
        sync_updates: updates made without delay (and without error feedback) before the delayed part starts.
        prediction: evaluate gradients at predicted weights, for batches whose version is old.

    Raises:
        ValueError: no stages, a number of delays other than that of the stages, or an optimizer that error feedback
            refuses.

    Attributes:
        step: batches trained on so far, which is the version of the newest weights.
        gradient_norm: norm over all stages of the last averaged gradient, a float32 scalar; None without clipping.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        loss_fn: Loss,
        make_optimizer: MakeOptimizer,
        config: AsyncConfig,
        make_scheduler: MakeScheduler | None = None,
        ties: Sequence[Tie] | None = None,
        sync_updates: int = 0,
        prediction: WeightPrediction | None = None,
    ) -> None:
        count = len(stages)
        if not count or sync_updates < 0:
            raise ValueError(f"{count} stages, sync_updates {sync_updates}: need a stage, and not a negative number")
        if isinstance(config.delay, tuple) and len(config.delay) != count:
            raise ValueError(f"{len(config.delay)} delays for {count} stages: give one for each, or one for all")
        self.config, self.loss_fn, self.prediction, self.sync_updates = config, loss_fn, prediction, sync_updates
        self.ties = tuple(ties_of(stages) if ties is None else ties)
        self._stages = [_Stage(m, config.delay_of(s), config, make_optimizer) for s, m in enumerate(stages)]
        if make_scheduler is not None:
            for stage in self._stages:
                stage.scheduler = make_scheduler(stage.optimizer) if stage.optimizer is not None else None
        self.step = 0
        self.gradient_norm: Tensor | None = None

    @property
    def optimizers(self) -> list[Optimizer | None]:
        """One a stage."""
        return [stage.optimizer for stage in self._stages]

    def parameters_by_stage(self) -> list[dict[str, nn.Parameter]]:
        """Trained parameters of each stage by name, the newest version."""
        return [dict(zip(stage.names, stage.parameters, strict=True)) for stage in self._stages]

    def version_of(self, stage: int) -> int:
        """The version at which the next batch is evaluated on a stage."""
        return version_of(self.step, self._stages[stage].delay, sync_updates=self.sync_updates)

    def train_batch(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch.

        Args:
            inputs: (rows, ...); a multiple of ``micro_batches`` rows.
            targets: (rows, ...).

        Returns:
            Mean loss of the micro-batches, at the version that their gradients were taken at.

        Raises:
            ValueError: rows that the micro-batches do not divide; nothing has changed.
        """
        m = self.config.micro_batches
        pairs = list(zip(numerics.split_batch(inputs, m), numerics.split_batch(targets, m), strict=True))
        leaves = [s.leaves(self.version_of(i), self.step, self.prediction) for i, s in enumerate(self._stages)]
        sums: list[list[Tensor | None]] = [[None] * len(stage.parameters) for stage in self._stages]
        losses = [self._micro_batch(x, y, leaves, sums) for x, y in pairs]
        for stage_sums in sums:
            numerics.average(stage_sums, m)
        self._add_tied(sums)
        self._clip(sums)
        for stage, gradients in zip(self._stages, sums, strict=True):
            if isinstance(stage.optimizer, ErrorFeedback) and self.sync_updates:
                stage.optimizer.active = self.step >= self.sync_updates
            oldest = version_of(self.step + 1, stage.delay, sync_updates=self.sync_updates)
            stage.update(gradients, self.step, oldest - (self.prediction is not None))
        self.step += 1
        return numerics.mean_loss(losses)

    def run(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
        """Train on (inputs, targets) pairs in order; returns their losses."""
        return [self.train_batch(inputs, targets) for inputs, targets in batches]

    def _micro_batch(self, x: Tensor, y: Tensor, leaves: list[list[Tensor]], sums: list[list[Tensor | None]]) -> float:
        """Forward and backward, a graph for each stage as in processes of their own; gradients go into ``sums``."""
        received: list[Tensor] = []
        outputs: list[Tensor] = []
        for index, stage in enumerate(self._stages):
            received.append(x)
            outputs.append(stage.forward(leaves[index], x))
            x = outputs[-1].detach().contiguous().requires_grad_()
        loss = self.loss_fn(outputs[-1], y)
        outputs[-1], gradient = loss, None
        for index in reversed(range(len(self._stages))):
            wanted = list(leaves[index])
            if index:
                wanted.append(received[index])
            found: list[Tensor | None] = [None] * len(wanted)
            if wanted and outputs[index].requires_grad:
                found = list(torch.autograd.grad(outputs[index], wanted, gradient, allow_unused=True))
            if index:
                passed = found.pop()
                gradient = torch.zeros_like(received[index]) if passed is None else passed.contiguous()
            numerics.accumulate(sums[index], found)
            outputs[index] = received[index]  # this stage's graph is done with
        return float(loss.detach())

    def _tied_indices(self) -> list[tuple[int, int, int, int]]:
        """First stage and position, last stage and position of each tied weight that is trained."""
        return [
            (
                t.first,
                self._stages[t.first].names.index(t.first_name),
                t.last,
                self._stages[t.last].names.index(t.last_name),
            )
            for t in self.ties
            if t.first_name in self._stages[t.first].names
        ]

    def _add_tied(self, sums: list[list[Tensor | None]]) -> None:
        for first, i, last, j in self._tied_indices():
            a, b = sums[first][i], sums[last][j]
            total = a + b if a is not None and b is not None else a if a is not None else b
            sums[first][i] = total
            sums[last][j] = None if total is None else total.clone()

    def _clip(self, sums: list[list[Tensor | None]]) -> None:
        if self.config.clip_norm is None:
            return
        copies = {(last, j) for _, _, last, j in self._tied_indices()}
        partials = [
            numerics.norm_partial(g for j, g in enumerate(gradients) if (s, j) not in copies)
            for s, gradients in enumerate(sums)
        ]
        self.gradient_norm = numerics.total_norm(partials)
        factor = numerics.clip_factor(self.gradient_norm, self.config.clip_norm)
        for gradients in sums:
            numerics.scale(gradients, factor)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that the next batch depends on; loads with ``torch.load(weights_only=True)``.

        Returns:
            ``step`` and, for each stage, ``module`` (the newest weights), ``versions`` (old weights by version and
            name), ``optimizer`` and ``scheduler``.
        """
        stages = []
        for stage in self._stages:
            versions = {v: dict(zip(stage.names, w, strict=True)) for v, w in stage.versions.items()}
            stages.append(
                {
                    "module": stage.module.state_dict(),
                    "versions": versions,
                    "optimizer": stage.optimizer.state_dict() if stage.optimizer is not None else None,
                    "scheduler": stage.scheduler.state_dict() if stage.scheduler is not None else None,
                }
            )
        return copy.deepcopy({"step": self.step, "stages": stages})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; data must go on at batch ``step``.

        Raises:
            ValueError: another number of stages, a missing scheduler, or a version of the weights that this delay
                needs and the state lacks.
        """
        saved, step = state_dict["stages"], int(state_dict["step"])
        if len(saved) != len(self._stages):
            raise ValueError(f"the state has {len(saved)} stages, this trainer {len(self._stages)}")
        for index, (stage, part) in enumerate(zip(self._stages, saved, strict=True)):
            needed = version_of(step, stage.delay, sync_updates=self.sync_updates)
            if needed != step and needed not in part["versions"]:
                raise ValueError(
                    f"stage {index} goes on at batch {step} with version {needed} of the weights, but the state has "
                    f"only {sorted([*part['versions'], step])}: it was saved with a smaller delay. To go on from "
                    f"synchronous training, use sync_updates={step}"
                )
            if (part["scheduler"] is None) != (stage.scheduler is None):
                raise ValueError(f"stage {index}: a scheduler in only one of the state and this trainer")
        for stage, part in zip(self._stages, saved, strict=True):
            stage.module.load_state_dict(part["module"])
            stage.versions = {
                v: [w[n].detach().to(p, copy=True) for n, p in zip(stage.names, stage.parameters, strict=True)]
                for v, w in part["versions"].items()
            }
            if stage.optimizer is not None:
                stage.optimizer.load_state_dict(part["optimizer"])
            if stage.scheduler is not None:
                stage.scheduler.load_state_dict(copy.deepcopy(part["scheduler"]))
        self.step = step
