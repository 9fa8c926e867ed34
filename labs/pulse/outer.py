"""Second half of the lab: workers train apart and exchange what the cast shows, everything, or every gradient.

PULSELoCo, dense DiLoCo and data parallelism take the same number of steps on the same problems. Each worker samples
problems of its own with its own weights, so the workers do differ within a round. Every round is checkpointed.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from dist_lib.comm import CommCounter
from dist_lib.models import Decoder
from dist_lib.pulse import DataParallel, DenseDiLoCo, OuterConfig, PulseLoCo, resume, save_checkpoint
from dist_lib.tasks import GrpoConfig, VerifiableTask, sample_rollouts
from dist_lib.tasks.grpo import answer_log_probs, group_advantages, grpo_loss
from labs.framework import RunContext
from labs.pulse.config import Config
from labs.pulse.sync import build, share_right

Loop = PulseLoCo | DenseDiLoCo | DataParallel
LOOPS: dict[str, type[Loop]] = {"pulse": PulseLoCo, "diloco": DenseDiLoCo, "ddp": DataParallel}


@dataclass
class Outcome:
    """What one method did; plain values, so that it can be saved.

    Attributes:
        accuracy: of the agreed weights at the end.
        digest: of weights and momentum at the end.
        rounds: for each round: ``counted``, bytes that this rank handed to collectives, as the counter saw them, and
            ``formula``, as the loop's own metrics have it; ``payload`` and ``dense``, bytes of this worker's update,
            coded and as four bytes a parameter; ``gate`` and ``union``, shares of coordinates that this worker sent
            and that any did.
    """

    accuracy: float = 0.0
    digest: str = ""
    rounds: list[dict[str, float]] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Sum of one number over all rounds."""
        return int(sum(row[name] for row in self.rounds))

    def mean(self, name: str) -> float:
        """Mean of one number over all rounds."""
        return sum(row[name] for row in self.rounds) / len(self.rounds)


def loss_of_step(
    model: Decoder, acting: Decoder, task: VerifiableTask, settings: GrpoConfig, step: int
) -> tuple[torch.Tensor, float]:
    """GRPO loss of a batch that the cast of the weights sampled, and the mean reward."""
    with torch.no_grad():
        for w, theta in zip(acting.parameters(), model.parameters(), strict=True):
            w.copy_(theta.bfloat16())
    batch = sample_rollouts(acting, task, settings, step=step, version=step)
    now = answer_log_probs(acting, task, batch.tokens, settings.temperature)
    sampled, advantages = (t.to(now.device) for t in (batch.log_probs, group_advantages(batch.rewards).flatten()))
    loss = grpo_loss(now, sampled, advantages, clip_low=settings.clip_low, clip_high=settings.clip_high)
    return loss, float(batch.rewards.mean())


def make_loop(name: str, config: Config, model: nn.Module) -> Loop:
    """An outer loop on a model. Collective."""
    inner = torch.optim.AdamW(model.parameters(), lr=config.inner_lr, betas=(0.9, 0.999), weight_decay=0.01)
    outer = OuterConfig(
        inner_steps=1 if name == "ddp" else config.inner_steps,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
    )
    return LOOPS[name](model, inner, outer)


def train(name: str, config: Config, context: RunContext, before: int, total: int, state: dict[str, Any]) -> Outcome:
    """Train with one outer loop, from its last checkpoint if there is one; every rank calls this.

    Args:
        name: ``pulse``, ``diloco`` or ``ddp``.
        config: of the lab.
        context: of the run.
        before: steps of the lab that came first.
        total: steps of the whole lab.
        state: of the run; ``outcomes`` in it are those of this lab's loops so far.
    """
    outcome = Outcome(**state["outcomes"].get(name, {}))
    model, task = build(config, context)
    acting = copy.deepcopy(model)
    settings = GrpoConfig(
        lr=config.inner_lr,
        prompts=config.prompts,
        samples=config.samples,
        seed=1 + context.dist.world_size * context.seed + context.dist.rank,  # every worker has problems of its own
    )
    loop = make_loop(name, config, model)
    folder = context.directory / name
    if context.resumed:
        resume(loop, folder)
    del outcome.rounds[loop.rounds :]  # of a round whose checkpoint did not come about
    context.history[:] = [row for row in context.history if row["step"] <= before + loop.steps_done]
    for step in range(loop.steps_done, config.rounds * config.inner_steps):
        loss, reward = loss_of_step(model, acting, task, settings, step)
        acting.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(acting.parameters(), settings.grad_clip)
        for theta, w in zip(model.parameters(), acting.parameters(), strict=True):
            theta.grad = w.grad
        with context.timed(name), CommCounter() as counter:
            took = loop.step()
        row = {f"{name}_reward": reward}
        if took is not None:
            outcome.rounds.append(
                {
                    "counted": counter.bytes(),
                    "formula": took.counted_bytes,
                    "payload": took.payload_bytes,
                    "dense": took.dense_bytes,
                    "gate": took.gate_density,
                    "union": took.union_density,
                }
            )
            row |= {f"{name}_sent_percent": 100 * took.gate_density}
        context.log_step(before + step + 1, total, **row)
        if took is not None:
            context.save_state(state | {"outcomes": {**state["outcomes"], name: asdict(outcome)}})
            save_checkpoint(loop, folder)
    acting.load_state_dict(loop.consensus(), strict=False)
    outcome.accuracy, outcome.digest = share_right(acting, task), loop.digest()
    return outcome
