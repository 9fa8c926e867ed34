"""Counts equal brute force, models equal simulation, bounds equal what Adam does at its worst."""

import math

import pytest
import torch

from dist_lib.pulse.errors import StateError
from dist_lib.pulse.sparsity_measures import (
    SparsityRecorder,
    adam_bound,
    adam_bound_sharp,
    by_layer,
    cast_state,
    count_changes,
    critical_weight,
    crossing_model,
    reference_bits,
    sparsity,
    threshold_model,
    total,
    ulp,
    visible,
)
from dist_lib.pulse.streams import StreamStep, adamw_stream


def test_counts_equal_a_loop_over_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    old = {"layers.0.w": torch.randn(5, 7, generator=generator).bfloat16(), "layers.1.w": torch.zeros(9)}
    old["head.w"] = torch.tensor([0.0, float("nan"), 1.0, float("inf")])
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["layers.0.w"][2] += 1
    new["head.w"][0] = -0.0  # equal as a value, not as bits; the NaN is the other way round
    counts = count_changes(old, new)
    for name in old:
        a, b = (
            t[name].view(torch.int16 if t[name].itemsize == 2 else torch.int32).reshape(-1).tolist() for t in (old, new)
        )
        assert counts[name].changed == sum(x != y for x, y in zip(a, b, strict=True))
        assert counts[name].cells == len(a)
    assert (total(counts).cells, total(counts).changed) == (48, 8)
    assert sparsity(old, new) == 1 - 8 / 48
    layers = by_layer(counts)
    assert layers["layers.0"].changed == 7 and layers["layers.1"].density == 0 and layers["head"].cells == 4


def test_tied_tensors_count_once_and_mismatches_are_refused() -> None:
    w = torch.zeros(8)
    tied = {"a": w, "b": w}
    assert total(count_changes(tied, tied)).cells == 8
    with pytest.raises(StateError, match="names"):
        count_changes({"a": w}, {})
    with pytest.raises(StateError, match="'a'"):
        count_changes({"a": w}, {"a": w.bfloat16()})


def test_cells_that_return_count_as_unchanged() -> None:
    recorder = SparsityRecorder((1, 2))
    states = [{"w": torch.full((4,), v)} for v in (1.0, 2.0, 1.0)]
    found = [recorder.record(s) for s in states]
    assert found == [{}, {1: 0.0}, {1: 0.0, 2: 1.0}]
    assert recorder.mean(1) == 0.0 and recorder.mean(2) == 1.0
    assert math.isnan(SparsityRecorder((1,)).mean(1))
    with pytest.raises(ValueError, match="positive"):
        SparsityRecorder((0, 1))


def test_cast_keeps_ties_and_rounds_to_even() -> None:
    w = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8])
    cast = cast_state({"a": w, "b": w, "i": torch.arange(3)})
    assert cast["a"].tolist() == [1.0, 1.0 + 2**-6] and cast["a"] is cast["b"]
    assert cast["i"].dtype == torch.int64


def test_spacing_of_every_finite_bfloat16() -> None:
    words = torch.arange(0x7F7F, dtype=torch.int32).to(torch.int16)
    low, high = words.view(torch.bfloat16), (words + 1).view(torch.bfloat16)
    assert torch.equal(ulp(low), high.float() - low.float())
    assert torch.equal(ulp(-low), ulp(low))


def test_visible_set_equals_brute_force_and_the_absorption_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    theta = (torch.randn(20000, generator=generator) * 0.02).bfloat16().float()
    step = torch.randn(20000, generator=generator) * 1e-4
    seen = visible(theta, step)
    slow = [
        a != b
        for a, b in zip(
            theta.bfloat16().view(torch.int16).tolist(),
            (theta - step).bfloat16().view(torch.int16).tolist(),
            strict=True,
        )
    ]
    assert seen.tolist() == slow
    absorbed, moved = step.abs() < theta.abs() / 512, step.abs() > theta.abs() / 256
    assert not bool(seen[absorbed].any()) and bool(seen[moved].all())
    assert 0 < int(seen[~absorbed & ~moved].sum()) < int((~absorbed & ~moved).sum())


def worst_gradients(beta1: float, beta2: float, steps: int) -> float:
    """|update| / lr after the gradients that reach the bound: proportional to a_j / c_j."""
    m = v = 0.0
    for t in range(1, steps + 1):
        j = steps - t
        g = ((1 - beta1) * beta1**j) / ((1 - beta2) * beta2**j)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return (m / (1 - beta1**steps)) / math.sqrt(v / (1 - beta2**steps))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_adams_bound_is_reached_and_not_passed(betas: tuple[float, float]) -> None:
    for steps in (1, 2, 10, 30, 100):
        assert worst_gradients(*betas, steps) == pytest.approx(adam_bound_sharp(*betas, steps), rel=1e-9)
    assert adam_bound_sharp(*betas) < adam_bound(*betas)
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(1000, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, weight_decay=0.0, eps=1e-30)
    for step in range(1, 40):
        before = weight.detach().clone()
        weight.grad = torch.randn(1000, generator=generator) ** 3
        optimizer.step()
        assert float((weight.detach() - before).abs().max()) <= adam_bound_sharp(*betas, step) * (1 + 1e-5)


def test_published_bounds() -> None:
    assert adam_bound(0.9, 0.999) == pytest.approx(10) and adam_bound(0.9, 0.95) == pytest.approx(1.414, abs=1e-3)
    assert adam_bound_sharp(0.9, 0.999) == pytest.approx(7.27, abs=0.005)
    assert adam_bound_sharp(0.9, 0.95) == pytest.approx(1.165, abs=5e-4)
    assert critical_weight(3e-6) == pytest.approx(7.7e-4, abs=1e-5)
    for bad in ((0.9, 0.5), (0.9, 1.0), (-0.1, 0.9)):
        with pytest.raises(ValueError, match="bound holds"):
            adam_bound(*bad)
    with pytest.raises(ValueError, match="from 1"):
        adam_bound_sharp(0.9, 0.999, 0)


def run(storage: str, lr: float) -> tuple[float, float, StreamStep]:
    recorder, last = SparsityRecorder((1, 8)), None
    for step in adamw_stream(700_000 if storage == "bf16" else 200_000, lr=lr, steps=30, storage=storage):
        if step.step >= 21:
            recorder.record({"w": step.new})
        last = step
    assert last is not None
    return 100 * recorder.history[1][-1], 100 * recorder.history[8][-1], last


def test_both_regimes_and_their_models() -> None:
    """Bands of our simulation at step 30; the models hold to a tenth of a point, each in its own regime only."""
    stored, master, slow_master = run("bf16", 3e-6), run("fp32", 3e-6), run("fp32", 1e-6)
    slow_stored = run("bf16", 1e-6)
    assert stored[0] == pytest.approx(99.15, abs=0.1) and master[0] == pytest.approx(97.45, abs=0.2)
    assert stored[1] == pytest.approx(98.58, abs=0.3) and master[1] == pytest.approx(87.9, abs=0.4)
    assert 100 * threshold_model(stored[2].update, stored[2].weight) == pytest.approx(stored[0], abs=0.1)
    assert 100 * crossing_model(master[2].update, master[2].weight) == pytest.approx(master[0], abs=0.1)
    assert abs(100 * threshold_model(master[2].update, master[2].weight) - master[0]) > 1
    assert (100 - master[0]) / (100 - slow_master[0]) == pytest.approx(2.53, abs=0.1)
    assert (100 - stored[0]) / (100 - slow_stored[0]) == pytest.approx(2.97, abs=0.15)


def test_reference_entropy_by_hand() -> None:
    old = torch.ones(8, dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[:2] += torch.tensor([1, -1], dtype=torch.int16)
    mask = 8 * (0.25 * 2 + 0.75 * math.log2(4 / 3))
    assert reference_bits(old, new) == pytest.approx(mask + 2 * 1.0)
    assert reference_bits(old, old) == 0
    with pytest.raises(StateError):
        reference_bits(old.float(), new.float())


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="'fp8'"):
        next(adamw_stream(4, lr=1.0, steps=1, storage="fp8"))
