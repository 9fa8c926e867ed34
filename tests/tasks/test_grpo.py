"""GRPO on addition: every formula against loops in float64, every batch and every step from the same bits."""

import copy
import math

import pytest
import torch

from dist_lib.models import Decoder
from dist_lib.pulse import cast_state, digest_state
from dist_lib.tasks import (
    Addition,
    GrpoConfig,
    GrpoTrainer,
    Rollouts,
    accuracy,
    answer_log_probs,
    greedy_answers,
    group_advantages,
    grpo_loss,
    sample_rollouts,
    token_log_probs,
    warm_start,
)

TASK = Addition(1)
SMALL = TASK.model_config(d_model=32, n_layers=1, d_ff=64)


def quick(**changes):
    return GrpoConfig(**{"lr": 1e-3, "warmup_steps": 2, "prompts": 6, "samples": 4, **changes})


def run(trainer, steps):
    found = []
    for _ in range(steps):
        batch = sample_rollouts(trainer.acting, trainer.task, trainer.config, step=trainer.steps, version=trainer.steps)
        found.append(trainer.step(batch))
    return found


def digest(trainer):
    return digest_state(trainer.model.state_dict(), workers=1).hex


@pytest.fixture(scope="module")
def started():
    model = Decoder(SMALL, seed=1)
    warm_start(model, TASK, steps=120, batch_size=64, lr=5e-3)
    return model


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_problems_are_sums(digits):
    task = Addition(digits)
    prompts, answers = task.problems(200, torch.Generator().manual_seed(0))
    for prompt, answer in zip(prompts, answers, strict=True):
        text = task.decode(prompt)
        assert len(text) == task.prompt_len and text[-1] == "="
        a, b = text[:-1].split("+")
        assert len(a) == len(b) == digits
        assert task.decode(answer) == str(int(a) + int(b)).zfill(digits + 1)
        assert torch.equal(task.encode(text), prompt)
    assert task.reward(prompts, answers).tolist() == [1.0] * 200
    for column in range(task.answer_len):
        wrong = answers.clone()
        wrong[:, column] = (wrong[:, column] + 1) % 10
        assert task.reward(prompts, wrong).sum() == 0
    wrong = answers.clone()
    wrong[:, -1] = 10  # "+" is no digit
    assert task.reward(prompts, wrong).sum() == 0


def test_model_has_six_hundred_thousand_parameters():
    model = Decoder(Addition(2).model_config())
    assert sum(p.numel() for p in model.parameters()) == 604_544


def test_advantages_against_loops():
    rewards = torch.tensor([[1.0, 0, 0, 1, 1], [0] * 5, [1] * 5, [0.1] * 5, [1, 0, 0, 0, 0]])
    found = group_advantages(rewards)
    for row, got in zip(rewards.double().tolist(), found.tolist(), strict=True):
        mean = sum(row) / len(row)
        std = math.sqrt(sum((r - mean) ** 2 for r in row) / len(row))
        wanted = [0.0] * len(row) if min(row) == max(row) else [(r - mean) / (std + 1e-6) for r in row]
        assert got == pytest.approx(wanted, abs=1e-5)
    assert found[1:4].abs().max() == 0


def brute_loss(new, old, advantages, low, high):
    terms = []
    for row, a in enumerate(advantages):
        for column in range(len(new[row])):
            r = math.exp(new[row][column] - old[row][column])
            terms.append(-min(r * a, min(max(r, 1 - low), 1 + high) * a))
    return sum(terms) / len(terms)


def test_loss_and_gradient_against_loops():
    generator = torch.Generator().manual_seed(4)
    old = -torch.rand(7, 3, generator=generator)
    new = (old + 0.8 * torch.randn(7, 3, generator=generator)).requires_grad_()
    advantages = torch.randn(7, generator=generator)
    loss = grpo_loss(new, old, advantages)
    lists = (new.double().tolist(), old.double().tolist(), advantages.double().tolist())
    assert float(loss.detach()) == pytest.approx(brute_loss(*lists, 0.2, 0.28), rel=1e-5)
    loss.backward()
    for row in range(7):
        for column in range(3):
            ratio, a = math.exp(lists[0][row][column] - lists[1][row][column]), lists[2][row]
            stopped = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
            wanted = 0.0 if stopped else -ratio * a / 21
            assert float(new.grad[row, column]) == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    sides = [(a > 0, r) for a, r in zip(lists[2], (new - old).exp().tolist(), strict=True)]
    assert any(up and max(r) > 1.28 for up, r in sides) and any(not up and min(r) < 0.8 for up, r in sides)


def test_log_probs_against_float64(started):
    generator = torch.Generator().manual_seed(0)
    prompts, answers = TASK.problems(5, generator)
    tokens = torch.cat((prompts, answers), 1)
    found = answer_log_probs(started, TASK, tokens, 0.7)
    wide = copy.deepcopy(started).double()
    for row in range(5):
        for place in range(TASK.answer_len):
            logits = wide(tokens[row : row + 1, : TASK.prompt_len + place])[0, -1] / 0.7
            wanted = logits[tokens[row, TASK.prompt_len + place]] - logits.exp().sum().log()
            assert float(found[row, place].detach()) == pytest.approx(float(wanted.detach()), abs=2e-4)
    assert torch.equal(token_log_probs(torch.zeros(1, 1, 4), torch.tensor([[2]])), torch.full((1, 1), math.log(0.25)))


def test_batches_depend_on_seed_step_and_weights_only(started):
    first = sample_rollouts(started, TASK, quick(), step=3, version=2)
    torch.manual_seed(77)
    torch.rand(5)
    again = sample_rollouts(copy.deepcopy(started), TASK, quick(lr=0.5), step=3, version=2)
    for name, tensor in first.to_state().items():
        assert torch.equal(tensor, again.to_state()[name]), name
    for step, seed in ((4, 0), (3, 1)):
        batch = sample_rollouts(started, TASK, quick(seed=seed), step=step, version=2)
        assert not torch.equal(batch.tokens, first.tokens)
    assert torch.equal(first.tokens[0, : TASK.prompt_len], first.tokens[3, : TASK.prompt_len])
    back = Rollouts.from_state(first.to_state())
    assert (back.step, back.version) == (3, 2) and torch.equal(back.tokens, first.tokens)


def test_rollouts_that_do_not_fit_are_refused(started):
    state = sample_rollouts(started, TASK, quick(), step=0, version=0).to_state()
    for damage in ({"rewards": state["rewards"][:2]}, {"tokens": state["tokens"].int()}, {"more": state["where"]}):
        with pytest.raises(ValueError, match="rollouts"):
            Rollouts.from_state({**state, **damage})


def test_fresh_batch_has_ratio_one_and_learns_from_mixed_groups_only(started):
    trainer = GrpoTrainer(started, TASK, quick())
    batch = sample_rollouts(trainer.acting, TASK, trainer.config, step=0, version=0)
    now = answer_log_probs(trainer.acting, TASK, batch.tokens, 1.0)
    assert torch.equal(now, batch.log_probs)  # bit for bit: the trainer's forward pass is the sampler's
    assert trainer.step(batch).clipped == 0
    same = Rollouts(1, 1, batch.tokens, batch.log_probs, torch.ones_like(batch.rewards))
    found = trainer.step(same)
    assert found.loss == 0 and found.grad_norm == 0
    with pytest.raises(ValueError, match="step 2 is next"):
        trainer.step(batch)


def test_first_step_is_adamw_of_the_clipped_gradient(started):
    trainer = GrpoTrainer(started, TASK, quick(warmup_steps=0, grad_clip=1e9, weight_decay=0.0))
    batch = sample_rollouts(trainer.acting, TASK, trainer.config, step=0, version=0)
    twin = copy.deepcopy(trainer.acting)
    loss = grpo_loss(
        answer_log_probs(twin, TASK, batch.tokens, 1.0), batch.log_probs, group_advantages(batch.rewards).flatten()
    )
    loss.backward()
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.step(batch)
    for name, p in trainer.model.named_parameters():
        gradient = dict(twin.named_parameters())[name].grad
        wanted = before[name] - 1e-3 * gradient / (gradient.abs() + 1e-8)  # Adam's first step
        assert torch.allclose(p, wanted, atol=1e-7, rtol=0), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_same_bits_again_and_after_a_restart(started, storage, optimizer):
    config = quick(storage=storage, optimizer=optimizer)
    one, other = GrpoTrainer(started, TASK, config), GrpoTrainer(started, TASK, config)
    first = run(one, 2)
    saved = copy.deepcopy(one.state_dict())
    rest = run(one, 3)
    assert run(other, 5) == first + rest and digest(one) == digest(other)
    resumed = GrpoTrainer(Decoder(SMALL, seed=9), TASK, config)
    resumed.load_state_dict(saved)
    assert run(resumed, 3) == rest and digest(resumed) == digest(one)


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_storage_and_cast(started, storage):
    trainer = GrpoTrainer(started, TASK, quick(storage=storage))
    run(trainer, 3)
    stored = trainer.model.state_dict()
    on_grid = all(torch.equal(t, t.bfloat16().float()) for t in stored.values())
    assert on_grid == (storage == "bf16")
    weights = trainer.weights()
    shared = cast_state(stored)
    assert digest_state(weights, workers=1) == digest_state(shared, workers=1)
    assert weights["lm_head.weight"].data_ptr() == weights["embed_tokens.weight"].data_ptr()
    for name, w in trainer.acting.state_dict().items():
        assert torch.equal(w, weights[name].float()), name


def test_lost_steps_under_bfloat16_storage(started):
    """Steps too small for the grid are lost for ever in one regime and add up in the other."""
    moved = {}
    for storage in ("fp32", "bf16"):
        trainer = GrpoTrainer(started, TASK, quick(storage=storage, lr=2e-6, warmup_steps=0))
        before = cast_state(trainer.model.state_dict())
        steps = run(trainer, 12)
        assert all(0 < s.moved < 2 for s in steps)
        after = trainer.weights()
        moved[storage] = sum(int((after[n] != before[n]).sum()) for n in after)
    assert 0 < moved["bf16"] < 0.5 * moved["fp32"]


def test_warm_start_and_rewards_teach(started):
    assert accuracy(Decoder(SMALL, seed=1), TASK, problems=300) < 0.2
    before = accuracy(started, TASK, problems=300)
    assert before > 0.2
    prompts, _ = TASK.problems(300, torch.Generator().manual_seed(10_007))
    right = TASK.reward(prompts, greedy_answers(started, TASK, prompts)).mean()
    assert float(right) == before
    trainer = GrpoTrainer(started, TASK, quick(prompts=16, samples=16))
    rewards = [s.reward for s in run(trainer, 120)]
    assert sum(rewards[-16:]) / 16 > sum(rewards[:16]) / 16 + 0.03  # by 0.06; chance alone gives 0.01


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"lr": float("nan")}, {"samples": 1}, {"prompts": 0}, {"temperature": 0.0}, {"clip_low": 1.0},
     {"storage": "fp16"}, {"optimizer": "sgd"}, {"grad_clip": 0.0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        quick(**wrong)
    with pytest.raises(ValueError, match="digits"):
        Addition(0)
    with pytest.raises(ValueError, match="characters"):
        TASK.encode("1-2=")
