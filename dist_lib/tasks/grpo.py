"""Group-relative policy optimisation (GRPO) on a task with verifiable rewards, small enough to read and to repeat.

Pure functions compute advantages and the loss; :func:`sample_rollouts` draws answers; :class:`GrpoTrainer` takes the
steps. Settings follow the experiments of arXiv:2602.03839: advantages normalised within each group, ratios of tokens
clipped at 0.2 below and 0.28 above, no KL term, no entropy bonus, AdamW with beta2 = 0.999, a short warm-up. Both sides
compute with the bfloat16 cast of the weights (in float32 arithmetic, which CPUs are fast at), so what the trainer
differentiates is exactly what the sampler acted with. A batch depends on the seed, its step and those weights alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_lib.models import Decoder
from dist_lib.optim import MuonWithAdamW


class VerifiableTask(Protocol):
    """Problems whose answers can be checked, such as :class:`~dist_lib.tasks.Addition`; all sequences equally long."""

    @property
    def prompt_len(self) -> int:
        """Tokens of a prompt."""

    @property
    def answer_len(self) -> int:
        """Tokens of an answer."""

    def problems(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Prompts (count, prompt_len) and right answers (count, answer_len), both int64."""

    def reward(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Rewards (N,) float32 of answers (N, answer_len) to prompts (N, prompt_len)."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Settings of a run.

    Attributes:
        lr: peak learning rate; constant after the warm-up.
        warmup_steps: steps of linear warm-up.
        prompts: problems of a step.
        samples: answers to each of them, at least 2.
        temperature: that logits are divided by, in sampling and in the loss.
        clip_low, clip_high: ratios count within 1 - clip_low and 1 + clip_high.
        betas: of AdamW.
        weight_decay: decoupled.
        grad_clip: largest norm of the gradient.
        storage: ``"fp32"`` keeps float32 masters; ``"bf16"`` rounds parameters to bfloat16 after every step, so that a
            step below half a spacing is lost (moments stay float32).
        optimizer: ``"adamw"``, or ``"muon"`` for hidden matrices with AdamW for the rest.
        seed: of prompts and answers.

    Raises:
        ValueError: a setting out of its range, named with its value.
    """

    lr: float
    warmup_steps: int = 5
    prompts: int = 32
    samples: int = 8
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    storage: str = "fp32"
    optimizer: str = "adamw"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"lr": 0.0, "warmup_steps": 0, "prompts": 1, "samples": 2, "clip_high": 0.0, "weight_decay": 0.0}
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {value}")
        if not self.temperature > 0 or not 0 <= self.clip_low < 1 or not self.grad_clip > 0:
            raise ValueError(
                f"temperature {self.temperature} and grad_clip {self.grad_clip} must be above 0, clip_low "
                f"{self.clip_low} from 0 to below 1"
            )
        for name, allowed in {"storage": ("fp32", "bf16"), "optimizer": ("adamw", "muon")}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Rollouts:
    """Answers of one version of the weights to one step's problems.

    Attributes:
        step: for which the batch is.
        version: of the weights that answered.
        tokens: (prompts * samples, sequence) int64, the samples of a prompt in consecutive rows.
        log_probs: (prompts * samples, answer) float32, of the answers' tokens as sampled.
        rewards: (prompts, samples) float32.
    """

    step: int
    version: int
    tokens: Tensor
    log_probs: Tensor
    rewards: Tensor

    def to_state(self) -> dict[str, Tensor]:
        """As a mapping of names to tensors, which can travel like weights."""
        return {
            "log_probs": self.log_probs,
            "rewards": self.rewards,
            "tokens": self.tokens,
            "where": torch.tensor([self.step, self.version]),
        }

    @staticmethod
    def from_state(state: Mapping[str, Tensor]) -> Rollouts:
        """The inverse of :meth:`to_state`.

        Raises:
            ValueError: other names, dtypes or shapes that do not fit together.
        """
        names = ["log_probs", "rewards", "tokens", "where"]
        if sorted(state) != names:
            raise ValueError(f"rollouts are {names}, not {sorted(state)}")
        step, version = state["where"].tolist()
        found = Rollouts(step, version, state["tokens"], state["log_probs"], state["rewards"])
        rows = found.rewards.numel()
        fits = found.rewards.ndim == found.tokens.ndim == found.log_probs.ndim == 2
        if not fits or len(found.tokens) != rows or len(found.log_probs) != rows or found.tokens.dtype != torch.int64:
            shapes = {n: f"{state[n].dtype} {tuple(state[n].shape)}" for n in names}
            raise ValueError(f"parts of rollouts do not fit together: {shapes}")
        return found


def group_advantages(rewards: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (std + eps)`` within each group; 0 for groups whose rewards are all equal.

    Args:
        rewards: (groups, samples), float.
        eps: added to the standard deviation, which is that of the population.
    """
    mean = rewards.mean(1, keepdim=True)
    std = rewards.std(1, correction=0, keepdim=True)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # rounding must not make an advantage of nothing
    return torch.where(equal, torch.zeros_like(rewards), (rewards - mean) / (std + eps))


def token_log_probs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of ``tokens`` (N, A) under ``logits`` (N, A, V) divided by ``temperature``; (N, A)."""
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def grpo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> Tensor:
    """Clipped surrogate with one ratio for each token: mean of ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    Args:
        log_probs: (N, A) of the tokens now; gradients flow through these.
        old_log_probs: (N, A) when they were sampled.
        advantages: (N,) of the answers.
        clip_low, clip_high: how far a ratio counts below and above 1.

    Returns:
        Scalar; every token counts alike.
    """
    ratio = (log_probs - old_log_probs.detach()).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    weight = advantages.detach()[:, None]
    return -torch.minimum(ratio * weight, clipped * weight).mean()


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; problems, answers and rewards are on the CPU."""
    return next(model.parameters()).device


def answer_log_probs(model: Decoder, task: VerifiableTask, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the answers in whole sequences (N, seq_len); (N, answer_len), on the model's device."""
    tokens = tokens.to(device_of(model))
    logits = model(tokens[:, :-1])[:, task.prompt_len - 1 :]
    return token_log_probs(logits, tokens[:, task.prompt_len :], temperature=temperature)


@torch.no_grad()
def sample_rollouts(model: Decoder, task: VerifiableTask, config: GrpoConfig, *, step: int, version: int) -> Rollouts:
    """Draw a step's problems and answers to them.

    Args:
        model: what acts.
        task: whose problems.
        config: how many, and the seed.
        step: for which the batch is; with the seed it decides the problems and the chance in answers.
        version: of the model's weights, noted in the result.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + 500_000_000 + step)
    prompts, _ = task.problems(config.prompts, generator)
    tokens = prompts.repeat_interleave(config.samples, dim=0)
    for _ in range(task.answer_len):
        logits = model(tokens.to(device_of(model)))[:, -1].cpu()
        chances = (logits.double() / config.temperature).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=generator)), dim=1)
    rewards = task.reward(tokens[:, : task.prompt_len], tokens[:, task.prompt_len :])
    log_probs = answer_log_probs(model, task, tokens, config.temperature).cpu()
    return Rollouts(step, version, tokens, log_probs, rewards.view(config.prompts, config.samples))


@dataclass(frozen=True)
class GrpoStep:
    """What one step of training did.

    Attributes:
        step: its number from 0.
        version: of the weights that sampled its batch.
        loss, reward: means over tokens and over answers.
        grad_norm: before clipping.
        moved: mean size of the optimizer's update over the learning rate, before any rounding.
        clipped: share of tokens whose ratio lay outside the clip range.
    """

    step: int
    version: int
    loss: float
    reward: float
    grad_norm: float
    moved: float
    clipped: float


class GrpoTrainer:
    """Takes GRPO steps on rollouts.

    Args:
        model: start; copied.
        task: of the rollouts.
        config: settings.

    Attributes:
        model: the stored parameters, float32 (on the grid of bfloat16 with that storage).
        acting: the same cast to bfloat16, in float32 arithmetic: what the loss is computed with.
        steps: taken so far; the number of the next one, and the version of the weights as they are.
    """

    def __init__(self, model: Decoder, task: VerifiableTask, config: GrpoConfig) -> None:
        self.task, self.config, self.steps = task, config, 0
        self.model, self.acting = copy.deepcopy(model), copy.deepcopy(model)
        self._round()
        self.optimizer = _optimizer(self.model, config)

    @torch.no_grad()
    def _round(self) -> None:
        for theta, w in zip(self.model.parameters(), self.acting.parameters(), strict=True):
            w.copy_(theta.bfloat16())
            if self.config.storage == "bf16":
                theta.copy_(w)

    def weights(self) -> dict[str, Tensor]:
        """The bfloat16 cast of the parameters by name, tied ones shared: what a sampler needs."""
        cast = {id(p): p.detach().bfloat16() for p in self.model.parameters()}
        return {name: cast[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}

    def step(self, batch: Rollouts) -> GrpoStep:
        """One step on one batch.

        Raises:
            ValueError: a batch for another step.
        """
        if batch.step != self.steps:
            raise ValueError(f"step {self.steps} is next, but these rollouts are for step {batch.step}")
        c = self.config
        lr = c.lr * min(1.0, (self.steps + 1) / (c.warmup_steps + 1))
        now = answer_log_probs(self.acting, self.task, batch.tokens, c.temperature)
        sampled, advantages = (t.to(now.device) for t in (batch.log_probs, group_advantages(batch.rewards).flatten()))
        loss = grpo_loss(now, sampled, advantages, clip_low=c.clip_low, clip_high=c.clip_high)
        self.acting.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.acting.parameters(), c.grad_clip)
        moved = self._update(lr)
        ratio = (now.detach() - sampled).exp()
        outside = ((ratio < 1 - c.clip_low) | (ratio > 1 + c.clip_high)).float().mean()
        self.steps += 1
        reward = float(batch.rewards.mean())
        return GrpoStep(batch.step, batch.version, float(loss.detach()), reward, float(norm), moved, float(outside))

    @torch.no_grad()
    def _update(self, lr: float) -> float:
        """Let the optimizer act on the stored parameters; returns the mean size of its update over ``lr``."""
        before = [theta.clone() for theta in self.model.parameters()]
        for theta, w in zip(self.model.parameters(), self.acting.parameters(), strict=True):
            theta.grad = w.grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        sizes = [(t - b).abs().double().sum() for t, b in zip(self.model.parameters(), before, strict=True)]
        self._round()
        return float(sum(sizes)) / (lr * sum(b.numel() for b in before)) if lr > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on: parameters, the optimizer's state, the number of steps."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave; the next steps are then those of an uninterrupted run."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
        self._round()


def _optimizer(model: Decoder, config: GrpoConfig) -> Optimizer:
    decay, betas = config.weight_decay, config.betas
    if config.optimizer == "muon":
        return MuonWithAdamW(model, config.lr, weight_decay=decay, betas=betas)
    return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=betas, weight_decay=decay, foreach=False)
