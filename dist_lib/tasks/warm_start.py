"""Supervised training on right answers: what a model must be able to do before rewards can teach it anything.

A plain loop with AdamW that depends on its seed alone. Loss counts the tokens of the answer only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_lib.models import Decoder
from dist_lib.optim import warmup_cosine
from dist_lib.tasks.grpo import VerifiableTask, device_of


@torch.no_grad()
def greedy_answers(model: Decoder, task: VerifiableTask, prompts: Tensor) -> Tensor:
    """The likeliest answers, token by token: (N, prompt_len) int64 -> (N, answer_len) int64."""
    tokens = prompts
    for _ in range(task.answer_len):
        logits = model(tokens.to(device_of(model)))[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True).cpu()), dim=1)
    return tokens[:, task.prompt_len :]


def accuracy(model: Decoder, task: VerifiableTask, *, problems: int = 1000, seed: int = 10_007) -> float:
    """Share of problems whose greedy answer is right; the standard error is ``sqrt(p (1 - p) / problems)``.

    Args:
        model: what answers.
        task: whose problems.
        problems: how many are drawn.
        seed: which.
    """
    prompts, _ = task.problems(problems, torch.Generator().manual_seed(seed))
    return float(task.reward(prompts, greedy_answers(model, task, prompts)).mean())


def answer_loss(model: Decoder, task: VerifiableTask, prompts: Tensor, answers: Tensor) -> Tensor:
    """Mean cross-entropy of the answer's tokens given what is before them; scalar."""
    tokens = torch.cat((prompts, answers), dim=1).to(device_of(model))
    logits = model(tokens[:, :-1])[:, task.prompt_len - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, task.prompt_len :].flatten())


def warm_start(
    model: Decoder, task: VerifiableTask, *, steps: int, batch_size: int = 128, lr: float = 2e-3, seed: int = 0
) -> list[float]:
    """Train ``model`` in place on right answers, AdamW (0.9, 0.99), warm-up and cosine.

    Args:
        model: what is trained, float32.
        task: whose problems.
        steps: optimizer steps.
        batch_size: problems of a step.
        lr: peak learning rate.
        seed: which problems.

    Returns:
        Loss of each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01, foreach=False)
    factor = warmup_cosine(total_steps=steps, warmup_steps=min(50, steps // 4), final=0.05)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        loss = answer_loss(model, task, *task.problems(batch_size, generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * factor(step)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
