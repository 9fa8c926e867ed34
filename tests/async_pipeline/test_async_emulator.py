"""The emulator against loops written out by hand, and the ways to emulate a delay wrongly."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.emulator import DelayedTrainer, version_of
from dist_lib.async_pipeline.error_feedback import ErrorFeedback
from dist_lib.async_pipeline.mitigations import WeightPrediction
from dist_lib.async_pipeline.stages import split_decoder
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import Muon, warmup_cosine

Named = list[tuple[str, nn.Parameter]]
SMALL = DecoderConfig(vocab_size=32, d_model=16, n_layers=4, n_heads=2, n_kv_heads=2, d_ff=24, max_seq_len=8)


def layers(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    g = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
    modules += [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)]
    for module in modules:
        module.to(dtype)
        for p in module.parameters():
            p.data = torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype) * 0.4
    return modules


def batch(step: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(500 + step)
    return tuple(torch.randn(rows, n, generator=g, dtype=torch.float64).to(dtype) for n in (6, 3))  # type: ignore


def mse(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], 0.05, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.2, momentum=0.9)


def muon(named: Named) -> torch.optim.Optimizer:
    wide = [p for _, p in named if p.ndim > 1]
    return Muon(wide, 0.05)


def trainer(
    modules: list[nn.Module] | None = None, make: Callable[[Named], Any] = adamw, **options: Any
) -> DelayedTrainer:
    extra = {k: options.pop(k) for k in ("make_scheduler", "sync_updates", "prediction") if k in options}
    config = AsyncConfig(**{"micro_batches": 2, **options})
    return DelayedTrainer(modules or layers(), loss_fn=mse, make_optimizer=make, config=config, **extra)


def weights(t: DelayedTrainer) -> list[Tensor]:
    return [p.detach().clone() for stage in t.parameters_by_stage() for p in stage.values()]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def by_hand(
    steps: int, make: Callable[[Named], Any], *, delay: int, ef: bool, clip: float | None, m: int = 2
) -> list[Tensor]:
    """A list of all weights there ever were; one optimizer, updates formed by hand."""
    model = nn.Sequential(*layers())
    optimizer = make(list(model.named_parameters()))
    history: list[list[Tensor]] = []
    previous: list[Tensor] | None = None
    for g in range(steps):
        now = [p.detach().clone() for p in model.parameters()]
        history.append(now)
        old = copy.deepcopy(model)
        with torch.no_grad():
            for p, w in zip(old.parameters(), history[max(g - delay, 0)], strict=True):
                p.copy_(w)
        x, y = batch(g)
        loss = sum(mse(old(a), b) for a, b in zip(x.chunk(m), y.chunk(m), strict=True)) / m
        grads = torch.autograd.grad(loss, list(old.parameters()))
        norm = float(sum(q.square().sum() for q in grads)) ** 0.5
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        for p, q in zip(model.parameters(), grads, strict=True):
            p.grad = q * factor
        optimizer.step()
        u = [a - p.detach() for a, p in zip(now, model.parameters(), strict=True)]
        if ef and previous is not None:
            with torch.no_grad():
                for p, a, ui, before in zip(model.parameters(), now, u, previous, strict=True):
                    p.copy_(a - (2 * ui - before))
        previous = u
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("ef", [False, True])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_equals_the_loop_by_hand(delay: int, ef: bool, clip: float | None) -> None:
    t = trainer(delay=delay, error_feedback=ef, clip_norm=clip)
    t.run(batch(g) for g in range(12))
    # clipping: norms are float32 here and float64 there
    assert distance(weights(t), by_hand(12, adamw, delay=delay, ef=ef, clip=clip)) < (1e-12 if clip is None else 1e-5)


def test_the_delay_and_its_correction_change_the_result() -> None:
    found = {}
    for name, options in {"sync": {"delay": 0}, "delay": {}, "ef": {"error_feedback": True}}.items():
        t = trainer(**options)
        t.run(batch(g) for g in range(10))
        found[name] = weights(t)
    assert min(distance(found[a], found[b]) for a, b in (("sync", "delay"), ("delay", "ef"), ("sync", "ef"))) > 1e-3


@pytest.mark.parametrize("make", [adamw, sgd])
def test_no_delay_is_plain_training_bit_for_bit(make: Callable[[Named], Any]) -> None:
    t = trainer([nn.Sequential(*layers(dtype=torch.float32))], make, delay=0, micro_batches=1)
    model = nn.Sequential(*layers(dtype=torch.float32))
    optimizer = make(list(model.named_parameters()))
    for g in range(6):
        x, y = batch(g, dtype=torch.float32)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        assert t.train_batch(x, y) == float(loss.detach())
    assert distance(weights(t), [p.detach() for p in model.parameters()]) == 0.0


@pytest.mark.parametrize("make", [adamw, muon])
def test_the_number_of_stages_does_not_matter(make: Callable[[Named], Any]) -> None:
    """Without clipping: four stages, two, one give the same bits."""
    found = []
    for cut in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]):
        all_layers = layers(dtype=torch.float32)
        modules: list[nn.Module] = [nn.Sequential(*(all_layers[i] for i in part)) for part in cut]
        t = trainer(modules, make, error_feedback=True, micro_batches=4)
        losses = t.run(batch(g, dtype=torch.float32) for g in range(8))
        found.append((losses, weights(t)))
    for losses, w in found[1:]:
        assert losses == found[0][0]
        assert distance(w, found[0][1]) == 0.0


def test_batches_zero_and_one_see_the_initial_weights() -> None:
    start = nn.Sequential(*layers())
    t = trainer(micro_batches=1)
    expected = [float(mse(start(x), y).detach()) for x, y in (batch(0), batch(1), batch(2))]
    losses = t.run(batch(g) for g in range(3))
    assert losses[:2] == expected[:2]
    assert losses[2] != expected[2]


def test_versions() -> None:
    assert [version_of(g, 1) for g in range(5)] == [0, 0, 1, 2, 3]
    assert [version_of(g, 0) for g in range(3)] == [0, 1, 2]
    assert [version_of(g, 3) for g in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [version_of(g, 1, sync_updates=3) for g in range(6)] == [0, 1, 2, 3, 3, 4]


def test_only_the_versions_that_are_needed_are_kept() -> None:
    t = trainer(delay=(3, 2, 1, 0))
    for g in range(8):
        t.train_batch(*batch(g))
    assert [sorted(stage["versions"]) for stage in t.state_dict()["stages"]] == [[5, 6, 7], [6, 7], [7], []]


class Fifo:
    """A delay as a queue of gradients; ``stale`` and ``empty`` are right, their opposites are the mistakes."""

    def __init__(self, *, stale: bool = True, empty: bool = True) -> None:
        self.model = nn.Sequential(*layers())
        self.optimizer = adamw(list(self.model.named_parameters()))
        self.stale = stale
        self.queue = [] if empty else [[torch.zeros_like(p) for p in self.model.parameters()]]

    def batch(self, x: Tensor, y: Tensor) -> None:
        def gradient() -> list[Tensor]:
            return list(torch.autograd.grad(mse(self.model(x), y), list(self.model.parameters())))

        fresh = gradient() if self.stale else None
        if self.queue:
            for p, q in zip(self.model.parameters(), self.queue.pop(0), strict=True):
                p.grad = q
            self.optimizer.step()
        self.queue.append(fresh if fresh is not None else gradient())

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]


def test_a_queue_of_gradients_takes_them_before_the_update_and_starts_late() -> None:
    """Pitfall 1. Its weights are one batch behind; taken after the update, its gradients are not delayed.

    A queue that starts with a gradient of zeros makes one more update, which decays and counts.
    """
    t, sync = trainer(micro_batches=1), trainer(micro_batches=1, delay=0)
    right, after, early = Fifo(), Fifo(stale=False), Fifo(empty=False)
    for g in range(9):
        for queue in (right, after, early):
            queue.batch(*batch(g))
        if g < 8:
            t.train_batch(*batch(g))
            sync.train_batch(*batch(g))
    assert distance(weights(t), right.weights()) < 1e-13
    assert distance(weights(t), after.weights()) > 1e-3
    assert distance(weights(sync), after.weights()) < 1e-13
    assert distance(weights(t), early.weights()) > 1e-3


def test_weight_decay_acts_on_the_newest_weights() -> None:
    """Pitfall 2. Without gradients W(g) = W(0) (1 - lr wd)^g; decay of the stale version gives another sequence."""
    t = DelayedTrainer(
        layers(),
        loss_fn=lambda out, y: (out * 0.0).sum(),
        make_optimizer=adamw,
        config=AsyncConfig(micro_batches=1),
    )
    start = weights(t)
    t.run(batch(g) for g in range(3))
    factor = 1 - 0.05 * 0.1
    assert distance(weights(t), [w * factor**3 for w in start]) < 1e-15
    stale = factor - 0.05 * 0.1  # W(2) if the decay of the second update used W(0)
    assert distance(weights(t), [w * (stale - 0.05 * 0.1 * factor) for w in start]) > 1e-6


def test_counters_count_updates() -> None:
    """Pitfall 3. K batches are K updates, each bias-corrected by its own number; the first has Adam's full length."""
    t = DelayedTrainer(
        layers(),
        loss_fn=mse,
        make_optimizer=lambda named: torch.optim.Adam([p for _, p in named], 0.05, eps=1e-30),
        config=AsyncConfig(micro_batches=1),
        make_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1.0 / (1 + n)),
    )
    start = weights(t)
    t.train_batch(*batch(0))
    assert all(torch.allclose((a - b).abs(), torch.full_like(a, 0.05)) for a, b in zip(start, weights(t), strict=True))
    for g in range(1, 5):
        t.train_batch(*batch(g))
    for optimizer in t.optimizers:
        assert optimizer is not None
        assert {int(s["step"]) for s in optimizer.state.values()} == {5}
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 6)
    assert t.step == 5


RESUMED: dict[str, dict[str, Any]] = {
    "delay": {},
    "ef": {"error_feedback": True, "clip_norm": 0.3},
    "bfloat16": {"error_feedback": True, "ef_dtype": torch.bfloat16, "ef_strength": 0.5},
    "per stage": {"delay": (3, 2, 1, 0)},
    "prediction": {"prediction": WeightPrediction()},
    "sync start": {"sync_updates": 6, "error_feedback": True},
}


@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize("name", list(RESUMED))
def test_resumed_run_is_the_uninterrupted_one(name: str, make: Callable[[Named], Any]) -> None:
    """Pitfall 4: old versions, the previous update and its rules, counters and the schedule are in the state."""

    def fresh() -> DelayedTrainer:
        schedule = warmup_cosine(total_steps=12, warmup_steps=3, final=0.1)
        return trainer(
            layers(dtype=torch.float32),
            make,
            make_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, schedule),
            **RESUMED[name],
        )

    whole = fresh()
    for g in range(5):
        whole.train_batch(*batch(g, dtype=torch.float32))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    rest = [batch(g, dtype=torch.float32) for g in range(5, 11)]
    losses = whole.run(rest)
    file.seek(0)
    second = fresh()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.run(rest) == losses
    assert distance(weights(whole), weights(second)) == 0.0


@pytest.mark.parametrize("lost", ["versions", "previous"])
def test_a_resume_that_loses_old_weights_or_updates_differs(lost: str) -> None:
    t = trainer(error_feedback=True)
    t.run(batch(g) for g in range(5))
    state = t.state_dict()
    for stage in state["stages"]:
        if lost == "versions":
            stage["versions"] = {4: {n: p.clone() for n, p in stage["module"].items()}}
        else:
            stage["optimizer"]["error_feedback"]["previous"] = {}
    other = trainer(error_feedback=True)
    other.load_state_dict(state)
    rest = [batch(g) for g in range(5, 9)]
    t.run(rest), other.run(rest)
    assert distance(weights(t), weights(other)) > 1e-3


def test_a_bank_updated_in_place_is_no_delay() -> None:
    """The fault: the old version shares memory with the newest."""
    t, sync = trainer(), trainer(delay=0)
    for g in range(6):
        t.train_batch(*batch(g))
        sync.train_batch(*batch(g))
        for stage in t._stages:
            stage.versions = dict.fromkeys(stage.versions, stage.parameters)  # type: ignore[arg-type]
    assert distance(weights(t), weights(sync)) == 0.0


def test_each_stage_has_its_own_delay() -> None:
    """Two scalar stages, y = b a x with the loss y: their gradients are b x and a x, each at its own version."""

    class Scale(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x

    t = DelayedTrainer(
        [Scale(2.0), Scale(3.0)],
        loss_fn=lambda out, y: out.mean(),
        make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        config=AsyncConfig(micro_batches=1, delay=(2, 0)),
    )
    a, b = [2.0], [3.0]
    one = torch.ones(1, dtype=torch.float64)
    for g in range(6):
        t.train_batch(one, one)
        old = a[max(g - 2, 0)]
        a.append(a[-1] - 0.1 * b[g])
        b.append(b[-1] - 0.1 * old)
    assert [float(w) for w in weights(t)] == pytest.approx([a[-1], b[-1]], abs=1e-14)


def test_prediction_is_error_feedback_in_another_variable() -> None:
    """Predicted weights are those of a corrected run whose first update was corrected too (no weight decay)."""

    def adam(named: Named) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in named], 0.05)

    predicted = trainer(make=adam, prediction=WeightPrediction())
    corrected = trainer(make=adam, error_feedback=True)
    for optimizer in corrected.optimizers:
        assert isinstance(optimizer, ErrorFeedback)
        optimizer._previous = {p: torch.zeros_like(p) for p in optimizer.parameters}
    losses = [[t.train_batch(*batch(g)) for g in range(20)] for t in (predicted, corrected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    y, before = weights(predicted), predicted._stages
    old = [w for stage in before for w in stage.versions[19]]
    assert distance([2 * w - o for w, o in zip(y, old, strict=True)], weights(corrected)) < 1e-12
    plain = trainer(make=adam)
    assert [plain.train_batch(*batch(g)) for g in range(20)] != pytest.approx(losses[0], abs=1e-3)


def test_sync_start() -> None:
    """The first updates are the synchronous ones; then the delayed pipeline starts as from batch 0."""
    mixed, sync = trainer(sync_updates=4, error_feedback=True), trainer(delay=0)
    for g in range(4):
        assert mixed.train_batch(*batch(g)) == sync.train_batch(*batch(g))
    assert distance(weights(mixed), weights(sync)) == 0.0
    assert [mixed.version_of(0)] == [4]
    assert mixed.train_batch(*batch(4)) == sync.train_batch(*batch(4))
    assert distance(weights(mixed), weights(sync)) == 0.0  # the first corrected update is uncorrected
    mixed.train_batch(*batch(5)), sync.train_batch(*batch(5))
    assert distance(weights(mixed), weights(sync)) > 1e-3


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_embedding_of_a_decoder(stages: int) -> None:
    """Two copies that stay equal, trained as the one weight of the whole model, and counted once in the norm."""
    config = DecoderConfig(**{**vars(SMALL), "tie_embeddings": True})
    found = []
    for count in (1, stages):
        t = DelayedTrainer(
            split_decoder(Decoder(config, seed=1), count),
            loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
            make_optimizer=sgd,
            config=AsyncConfig(micro_batches=2, clip_norm=0.5, error_feedback=True),
        )
        g = torch.Generator().manual_seed(3)
        for _ in range(5):
            tokens = torch.randint(0, 32, (4, 9), generator=g)
            t.train_batch(tokens[:, :-1], tokens[:, 1:])
        parts = t.parameters_by_stage()
        if count > 1:
            assert torch.equal(parts[0]["embed_tokens.weight"], parts[-1]["lm_head.weight"])
        assert t.gradient_norm is not None
        found.append((parts[0]["embed_tokens.weight"].detach(), t.gradient_norm))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=0)


def test_what_is_not_trained() -> None:
    """Frozen parameters stay, a stage without trained ones needs no optimizer, an unused one gets no update."""
    modules = layers()
    modules[1].requires_grad_(False)
    modules[2].register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    next(modules[3].parameters()).requires_grad_(False)
    held = [p.detach().clone() for m in (modules[1], modules[3]) for p in m.parameters()]
    t = trainer(modules, error_feedback=True, clip_norm=0.5)
    t.run(batch(g) for g in range(3))
    assert t.optimizers[1] is None
    now = [p.detach() for m in (modules[1], modules[3]) for p in m.parameters()]
    assert torch.equal(now[0], held[0]) and torch.equal(now[2], held[2])
    assert not torch.equal(now[3], held[3])
    assert torch.equal(modules[2].unused, torch.ones(2, dtype=torch.float64))


def test_refusals() -> None:
    t = trainer(micro_batches=3)
    start = weights(t)
    with pytest.raises(ValueError, match="8 rows cannot be cut into 3"):
        t.train_batch(*batch(0))
    assert distance(start, weights(t)) == 0.0 and t.step == 0
    with pytest.raises(ValueError, match="2 delays for 4 stages"):
        trainer(delay=(1, 0))
    with pytest.raises(ValueError, match="0 stages"):
        DelayedTrainer([], loss_fn=mse, make_optimizer=sgd, config=AsyncConfig(micro_batches=1))
    sync = trainer(delay=0)
    sync.run(batch(g) for g in range(3))
    with pytest.raises(ValueError, match="sync_updates=3"):
        trainer().load_state_dict(sync.state_dict())
    switched = trainer(sync_updates=3)
    switched.load_state_dict(sync.state_dict())
    assert switched.version_of(0) == 3
    with pytest.raises(ValueError, match="4 stages, this trainer 1"):
        trainer([nn.Sequential(*layers())], delay=0).load_state_dict(sync.state_dict())
