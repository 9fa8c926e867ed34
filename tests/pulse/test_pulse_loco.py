"""The gate equals brute force, nothing is lost or rounded, and one worker steps as the formulas say."""

import doctest
import math

import numpy as np
import pytest
import torch

import dist_lib.pulse.loco as loco
from dist_lib.comm import CommCounter, distributed
from dist_lib.optim import MuonWithAdamW
from dist_lib.pulse import (
    DataParallel,
    DenseDiLoCo,
    NonFiniteError,
    OuterConfig,
    PulseError,
    PulseLoCo,
    StateError,
    apply,
    cast_state,
    decode,
    diff,
    digest_state,
    encode,
    resume,
    save_checkpoint,
)
from dist_lib.pulse.loco_config import dense_counted_bytes, dense_wire_bytes, sparse_wire_bytes
from dist_lib.pulse.loco_loop import nesterov_step
from dist_lib.pulse.loco_payload import payload_bound


@pytest.fixture(autouse=True)
def alone():
    with distributed(device="cpu"):
        yield


class Net(torch.nn.Module):
    """Two layers and a vector, small enough to look at; the loss pulls outputs towards fixed targets."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = torch.nn.Parameter(torch.randn(width, width, generator=generator) * 0.02)
        self.b = torch.nn.Parameter(torch.randn(width, width, generator=generator) * 0.02)
        self.c = torch.nn.Parameter(torch.ones(width))

    def loss(self, step: int, rank: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, len(self.c), generator=generator)
        return ((torch.tanh(x @ self.a) @ self.b) * self.c - x).square().mean()


def adamw(model: torch.nn.Module, lr: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)


def advance(loop, steps: int):
    last = None
    for _ in range(steps):
        loop.optimizer.zero_grad()
        loop.model.loss(loop.steps_done).backward()
        last = loop.step()
    return last


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, by integer arithmetic on FP32 bits; NaN to a quiet one, as torch does."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded & 0xFFFF).astype(np.uint16)


def test_the_gate_equals_brute_force_for_all_bfloat16_weights_and_steps_around_half_a_spacing():
    patterns = np.arange(65536, dtype=np.uint32) << 16
    theta = patterns.view(np.float32)
    with np.errstate(all="ignore"):
        spacing = np.abs((patterns ^ (1 << 16)).view(np.float32) - theta)
        generator = np.random.default_rng(0)
        for factor in (0.0, 0.25, 0.4999999, 0.5, 0.5000001, 1.0, 1.5, None):
            factors = generator.normal(size=theta.size).astype("f4") if factor is None else np.float32(factor)
            for sign in (1, -1):
                s = (sign * factors * spacing).astype(np.float32)
                found = loco.gate(torch.from_numpy(theta.copy()), torch.from_numpy(s)).numpy()
                wanted = bf16_bits(theta) != bf16_bits(theta - s)
                np.testing.assert_array_equal(found, wanted)
    assert not loco.gate(torch.tensor([0.0]), torch.tensor([0.0])).item()
    assert loco.gate(torch.tensor([-0.0]), torch.tensor([-0.0])).item()  # -0 becomes +0: seen in bits alone


def test_the_gate_for_masters_between_grid_points():
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(200_000, generator=generator) * 0.02
    s = torch.randn(200_000, generator=generator) * 1e-4
    wanted = bf16_bits(theta.numpy()) != bf16_bits((theta - s).numpy())
    assert 0.1 < wanted.mean() < 0.9
    np.testing.assert_array_equal(loco.gate(theta, s).numpy(), wanted)
    assert bool(loco.gate(theta, s, None).all())
    half = loco.gate(theta, s, torch.float16)
    assert torch.equal(half, theta.half().view(torch.int16) != (theta - s).half().view(torch.int16))


def test_sent_and_kept_add_up_in_every_bit():
    generator = torch.Generator().manual_seed(2)
    s = torch.randn(100_000, generator=generator) * torch.logspace(-40, 5, 100_000)
    mask = torch.rand(100_000, generator=generator) < 0.3
    sent, kept = loco.feedback(s, mask)
    assert torch.equal((sent + kept).view(torch.int32), s.view(torch.int32))
    assert not bool(((sent != 0) & (kept != 0)).any())


def test_what_is_sent_over_all_rounds_and_the_last_buffer_are_all_pseudo_gradients(monkeypatch):
    model = Net()
    loop = PulseLoCo(model, adamw(model, 3e-6), OuterConfig(inner_steps=2))
    pushed, sent = torch.zeros(loop.cells, dtype=torch.float64), torch.zeros(loop.cells, dtype=torch.float64)
    select = PulseLoCo._select

    def watched(self, s):
        nonlocal pushed, sent
        delta = self.theta - self._weights()
        assert torch.equal(s, delta + self.error)
        update = select(self, s)
        message = torch.zeros(self.cells)
        for positions, values in update.segments:
            message[torch.from_numpy(positions.astype("i8"))] = torch.from_numpy(values)
        assert torch.equal(message + self.error, s)  # exact, in each coordinate
        assert int(((message != 0) & (self.error != 0)).sum()) == 0
        pushed, sent = pushed + delta.double(), sent + message.double()
        return update

    monkeypatch.setattr(PulseLoCo, "_select", watched)
    metrics = advance(loop, 40)
    assert metrics.round == 20 and 0 < metrics.gate_density < 0.9 and metrics.error_norm > 0
    left = pushed - sent - loop.error.double()
    assert float(left.abs().max()) < 1e-6 * float(pushed.abs().max())


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_the_outer_step_is_that_of_torch(mu):
    generator = torch.Generator().manual_seed(4)
    theta = torch.randn(10_001, generator=generator)
    p = torch.nn.Parameter(theta.clone())
    momentum = torch.zeros_like(theta)
    outer = torch.optim.SGD([p], lr=0.7, momentum=mu, nesterov=mu > 0, foreach=False)
    for _ in range(5):
        g = torch.randn(10_001, generator=generator)
        p.grad = g.clone()
        outer.step()
        nesterov_step(theta, momentum, g, lr=0.7, mu=mu)
        assert torch.equal(theta, p.detach())


@pytest.mark.parametrize("gate_dtype", [None, torch.bfloat16])
def test_one_worker_one_step_without_momentum_takes_the_inner_step(gate_dtype):
    """theta becomes fl(theta - fl(theta - w)) where the gate is open, which is w itself for w/2 <= theta <= 2w."""
    model, plain = Net(), Net()
    optimizer = adamw(plain, 1e-3)
    config = OuterConfig(inner_steps=1, outer_lr=1.0, outer_momentum=0.0, gate_dtype=gate_dtype)
    loop = PulseLoCo(model, adamw(model, 1e-3), config)
    for _ in range(5):
        before = loop.theta.clone()
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        plain.loss(loop.steps_done).backward()
        optimizer.step()
        w = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
        loop.error.zero_()
        advance(loop, 1)
        s = before - w
        mask = loco.gate(before, s, gate_dtype)
        assert torch.equal(loop.theta, torch.where(mask, before - s, before))
        assert torch.equal(loop.error, torch.where(mask, torch.zeros(()), s))
        near = mask & (before * w > 0) & (w.abs() / 2 <= before.abs()) & (before.abs() <= 2 * w.abs())
        assert int(near.sum()) > 500 and torch.equal(loop.theta[near], w[near])
        if gate_dtype is None:
            assert int((loop.theta != w).sum()) < 100  # elsewhere it may differ by a rounding
            assert float((loop.theta - w).abs().max()) < 1e-9


def test_an_open_gate_is_dense_diloco_bit_for_bit():
    models = Net(), Net()
    config = OuterConfig(inner_steps=3, gate_dtype=None)
    sparse, dense = PulseLoCo(models[0], adamw(models[0]), config), DenseDiLoCo(models[1], adamw(models[1]), config)
    for _ in range(4):
        a, b = advance(sparse, 3), advance(dense, 3)
        assert a.digest == b.digest and a.gate_density == 1 and a.error_norm == 0
        assert torch.equal(sparse.theta, dense.theta) and torch.equal(sparse.momentum, dense.momentum)
    gated = Net()
    other = PulseLoCo(gated, adamw(gated), OuterConfig(inner_steps=3))
    advance(other, 12)
    assert not torch.equal(other.theta, dense.theta)


INNER = {
    "adamw": adamw,
    "muon": lambda model: MuonWithAdamW(model, lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", [PulseLoCo, DenseDiLoCo, DataParallel])
@pytest.mark.parametrize("stop", [4, 5])
def test_saving_and_loading_changes_no_bit_within_a_round_or_between(tmp_path, inner, kind, stop):
    config = OuterConfig(inner_steps=1 if kind is DataParallel else 2)

    def fresh():
        model = Net()
        return kind(model, INNER[inner](model), config)

    straight, first, second = fresh(), fresh(), fresh()
    advance(straight, 12)
    advance(first, stop)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.steps_done == stop
    advance(second, 12 - stop)
    assert second.metrics == straight.metrics
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True))
    if kind is PulseLoCo:
        assert torch.equal(straight.error, second.error) and bool(straight.error.any())
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        state["error"] = torch.zeros_like(state["error"])  # the buffer matters: without it the run goes another way
        third = fresh()
        third.load_state_dict(state)
        advance(third, 12 - stop)
        assert third.digest() != straight.digest()


def test_joining_takes_weights_and_momentum_alone():
    model = Net()
    loop = PulseLoCo(model, adamw(model), OuterConfig(inner_steps=2))
    advance(loop, 6)
    other = Net()
    joined = PulseLoCo(other, adamw(other), OuterConfig(inner_steps=2))
    advance(joined, 2)
    joined.load_consensus(loop.state_dict())
    assert torch.equal(joined.theta, loop.theta) and torch.equal(joined.momentum, loop.momentum)
    assert joined.rounds == 3 and not bool(joined.error.any()) and not joined.optimizer.state
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in other.parameters()]), loop.theta)
    joined.adopt(loop.error)
    assert torch.equal(joined.error, loop.error)
    advance(loop, 1)
    with pytest.raises(StateError, match="beginning of a round"):
        joined.load_consensus(loop.state_dict())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "format is 2"),
        ({"method": "diloco"}, "method is diloco"),
        ({"layout": []}, "layout is"),
        ({"inner_step": 2}, "inner step 2"),
        ({"theta": torch.zeros(3)}, "theta is not"),
        ({"error": None}, "error is not"),
        ({"momentum": torch.zeros(1176, dtype=torch.float64)}, "momentum is not"),
        ({"inner_step": 1, "workers": 3}, "of 3 workers"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, text):
    model = Net()
    loop = PulseLoCo(model, adamw(model), OuterConfig(inner_steps=2))
    assert loop.cells == 1176
    with pytest.raises(StateError, match=text):
        loop.load_state_dict({**loop.state_dict(), **change})
    with pytest.raises(PulseError, match="stopped in the middle"):
        advance(loop, 1)


@pytest.mark.parametrize("kind", [PulseLoCo, DenseDiLoCo, DataParallel])
def test_bytes_are_those_of_the_formulas(kind):
    model = Net()
    loop = kind(model, adamw(model), OuterConfig(inner_steps=1, digest_every=2))
    for digest in (False, True):
        with CommCounter() as counter:
            metrics = advance(loop, 1)
        assert counter.bytes() == metrics.counted_bytes and bool(metrics.digest) is digest
        if kind is PulseLoCo:
            assert metrics.counted_bytes == 32 + metrics.payload_bytes + 32 * digest
            assert metrics.payload_bytes <= payload_bound(loop.cells)
        else:
            assert metrics.counted_bytes == 32 + 2 * 4 * loop.cells + 32 * digest
        assert metrics.wire_bytes == 0 and math.isnan(metrics.wire_compression)


def test_formulas_of_links():
    assert dense_counted_bytes(10, 4) == 32 + 48 + 12 + 32  # ten cells are padded to twelve
    assert dense_wire_bytes(10, 4) == 3 * (2 * 12 + 64)
    assert sparse_wire_bytes(100, 4, digest=False) == 3 * 132


def test_a_worker_alone_whose_values_are_not_finite_is_an_error_and_the_end():
    for kind in (PulseLoCo, DenseDiLoCo, DataParallel):
        model = Net()
        loop = kind(model, adamw(model), OuterConfig(inner_steps=1))
        before = loop.theta.clone()
        loop.optimizer.zero_grad()
        (model.loss(0) * math.nan).backward()
        with pytest.raises(NonFiniteError, match="round 1"):
            loop.step()
        assert torch.equal(loop.theta, before)
        for call in (loop.step, loop.state_dict):
            with pytest.raises(PulseError, match="stopped in the middle"):
                call()


def test_models_and_options_that_make_no_sense():
    with pytest.raises(ValueError, match="float32"):
        PulseLoCo(Net().bfloat16(), adamw(Net()))
    with pytest.raises(ValueError, match="lacks"):
        model = Net()
        PulseLoCo(model, torch.optim.SGD([model.a], lr=0.1))
    with pytest.raises(ValueError, match="no parameter"):
        PulseLoCo(Net().requires_grad_(False), adamw(Net()))
    with pytest.raises(ValueError, match="at every step"):
        model = Net()
        DataParallel(model, adamw(model), OuterConfig())
    model = Net()
    with torch.no_grad():
        model.c[0] = math.inf
    with pytest.raises(NonFiniteError, match="first weights"):
        PulseLoCo(model, adamw(model))
    for options, text in (
        ({"inner_steps": 0}, "inner_steps is 0"),
        ({"digest_every": 0}, "digest_every 0"),
        ({"outer_lr": math.nan}, "outer_lr is nan"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"gate_dtype": torch.float32}, "gate_dtype is torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            OuterConfig(**options)


def test_frozen_parameters_stay_out():
    model = Net()
    model.c.requires_grad_(False)
    loop = PulseLoCo(model, torch.optim.AdamW([model.a, model.b], lr=1e-3), OuterConfig(inner_steps=1))
    advance(loop, 2)
    assert list(loop.consensus()) == ["a", "b"] and torch.equal(model.c, torch.ones(24))
    assert torch.equal(loop.consensus()["b"], model.b)


def test_inner_weights_in_bfloat16_open_the_gate_on_rounding_alone():
    """Why they must be FP32: rounded at the start of a round, they bring the rounding error back, round after round."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(50_000, generator=generator) * 0.02
    densities = {}
    for rounded in (True, False):
        theta, error, momentum, found = first.clone(), torch.zeros_like(first), torch.zeros_like(first), []
        for _ in range(12):
            w = theta.bfloat16().float() if rounded else theta.clone()  # no inner step moves: the learning rate is 0
            s = (theta - w) + error
            mask = loco.gate(theta, s)
            sent, error = loco.feedback(s, mask)
            nesterov_step(theta, momentum, sent, lr=0.7, mu=0.9)
            found.append(float(mask.float().mean()))
        densities[rounded] = found
    assert densities[False] == [0.0] * 12
    assert densities[True][0] < 0.01 and densities[True][-1] > 0.08


def test_segments_make_no_difference(monkeypatch):
    found = []
    for size in (loco.SEGMENT, 100):
        for module in ("loco", "loco_payload", "loco_exchange"):
            monkeypatch.setattr(f"dist_lib.pulse.{module}.SEGMENT", size)
        model = Net()
        loop = PulseLoCo(model, adamw(model), OuterConfig(inner_steps=2))
        metrics = advance(loop, 6)
        found.append((loop.theta, loop.error, metrics.sent_cells, metrics.union_cells))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2:] == found[1][2:]


def test_the_agreed_weights_can_be_published_as_patches():
    model = Net()
    loop = PulseLoCo(model, adamw(model), OuterConfig(inner_steps=2))
    served = cast_state(loop.consensus())
    for version in range(1, 4):
        advance(loop, 3)  # also in the middle of a round: the consensus is that of its beginning
        new = cast_state(loop.consensus())
        patch = diff(served, new, version=version, base_version=version - 1)
        served = apply(decode(encode(patch, "fast")), served)
        assert digest_state(served) == digest_state(new)
    assert loop.inner_step == 1 and not torch.equal(loop.consensus()["a"], model.a)


def test_old_checkpoints_are_removed_but_never_the_last_between_rounds(tmp_path):
    model = Net()
    loop = PulseLoCo(model, adamw(model), OuterConfig(inner_steps=3))
    for _ in range(7):
        advance(loop, 1)
        save_checkpoint(loop, tmp_path, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-00000002-step-000000", "round-00000002-step-000001"]
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(loop, tmp_path, keep=0)
    fresh = Net()
    again = PulseLoCo(fresh, adamw(fresh), OuterConfig(inner_steps=3))
    found = resume(again, tmp_path)
    assert (found.round, found.inner_step) == (2, 1) and again.digest() == loop.digest()


def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path, monkeypatch):
    model = Net()
    loop = PulseLoCo(model, adamw(model), OuterConfig(inner_steps=1))
    advance(loop, 1)
    save_checkpoint(loop, tmp_path)
    wanted = loop.digest()
    advance(loop, 1)
    monkeypatch.setattr("dist_lib.pulse.loco_checkpoint._sha256", lambda path: 1 / 0)  # after the file is written
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(loop, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "round-00000002-step-000000" / "rank-00000.pt").exists()
    fresh = Net()
    again = PulseLoCo(fresh, adamw(fresh), OuterConfig(inner_steps=1))
    assert resume(again, tmp_path).round == 1 and again.digest() == wanted


def test_the_example_of_the_documentation_runs():
    found = doctest.testmod(loco)
    assert found.attempted > 5 and found.failed == 0
