"""What the five exercises must do. Each check stands for a way in which asynchronous pipelines go wrong."""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dist_lib.checks import Check


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _same(found: Any, expected: Tensor, what: str) -> None:
    assert isinstance(found, Tensor), f"{what}: expected a tensor, got {type(found).__name__}"
    assert found.shape == expected.shape, f"{what}: the shape is {tuple(found.shape)}, not {tuple(expected.shape)}"
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    assert error < 1e-6, f"{what}: off by {error:.1%}"


# order

GRID = [(p, m, k) for p in (1, 2, 4) for m in (1, 2, 4, 6) for k in (1, 3)]


def _orders(module: ModuleType, stages: int, micro_batches: int, batches: int) -> list[list[tuple[str, int, int]]]:
    return [list(module.stage_order(s, stages, micro_batches, batches)) for s in range(stages)]


def _complete(module: ModuleType) -> None:
    for p, m, k in GRID:
        for s, order in enumerate(_orders(module, p, m, k)):
            case = f"stage {s} of {p}, {m} micro-batches, {k} batches"
            for kind in "FB":
                found = [(batch, micro) for what, batch, micro in order if what == kind]
                wanted = [(batch, micro) for batch in range(k) for micro in range(m)]
                assert found == wanted, f"{case}: the {kind}s are {found[:6]}..., they must be {wanted[:6]}..."


def _alternating(module: ModuleType) -> None:
    for p, m, k in GRID:
        for s, order in enumerate(_orders(module, p, m, k)):
            in_flight = most = 0
            for kind, _, _ in order:
                in_flight += 1 if kind == "F" else -1
                assert in_flight >= 0, f"stage {s} of {p} runs a backward before its forward"
                most = max(most, in_flight)
            allowed = min(p - s, m * k)
            assert most == allowed, f"stage {s} of {p} holds {most} micro-batches, with {m} x {k} it must be {allowed}"


def _no_flush(module: ModuleType) -> None:
    order = _orders(module, 2, 4, 2)[0]
    first_of_next, last_of_this = order.index(("F", 1, 0)), order.index(("B", 0, 3))
    assert first_of_next < last_of_this, "batch 1 starts only after batch 0 has ended: that is the bubble"


# delay


def _toy_gradient(weights: Tensor, batch: int) -> Tensor:
    return weights * (1 + 0.1 * batch) + 0.01 * batch


class _Momentum:
    """Momentum and weight decay, so that order, count and place of the calls matter."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.calls = 0

    def __call__(self, gradient: Tensor, newest: Tensor) -> Tensor:
        self.calls += 1
        self.buffer = gradient.clone() if self.buffer is None else 0.9 * self.buffer + gradient
        return 0.1 * (self.buffer + 0.5 * newest)


def _expected_run(start: Tensor, batches: int) -> list[Tensor]:
    update, versions = _Momentum(), [start.clone()]
    for batch in range(batches):
        stale = versions[batch - 1] if batch else versions[0]
        versions.append(versions[batch] - update(_toy_gradient(stale, batch), versions[batch]))
    return versions


def _trajectory(module: ModuleType) -> None:
    start = _randn(5, dtype=torch.float64)
    kept = start.clone()
    found = list(module.delayed_training(start, _toy_gradient, _Momentum(), 6))
    assert torch.equal(start, kept), "the weights given were changed"
    assert len(found) == 7, f"{len(found)} versions came back; six batches make 7"
    for version, (ours, wanted) in enumerate(zip(found, _expected_run(kept, 6), strict=True)):
        _same(ours, wanted, f"weights after {version} updates")


def _bootstrap(module: ModuleType) -> None:
    seen: list[Tensor] = []

    def spy(weights: Tensor, batch: int) -> Tensor:
        seen.append(weights.clone())
        return _toy_gradient(weights, batch)

    update = _Momentum()
    start = _randn(3, dtype=torch.float64)
    module.delayed_training(start.clone(), spy, update, 3)
    assert update.calls == 3, f"three batches made {update.calls} updates"
    assert torch.equal(seen[0], start) and torch.equal(seen[1], start), "batches 0 and 1 both use the first weights"
    assert not torch.equal(seen[2], start), "batch 2 uses the weights after one update"


# feedback


def _displacements(module: ModuleType, updates: list[Tensor]) -> list[Tensor]:
    feedback, out = module.Feedback(), []
    memory = torch.empty_like(updates[0])
    for update in updates:
        memory.copy_(update)  # an optimizer reuses its buffers
        out.append(feedback.displacement(memory).clone())
        assert torch.equal(memory, update), "the update given was changed"
    return out


def _formula(module: ModuleType) -> None:
    updates = [_randn(4, seed=n, dtype=torch.float64) for n in range(8)]
    found = _displacements(module, updates)
    _same(found[0], updates[0], "the first displacement")
    for n in range(1, 8):
        _same(found[n], 2 * updates[n] - updates[n - 1], f"displacement {n + 1}")


def _telescopes(module: ModuleType) -> None:
    updates = [_randn(4, seed=n, dtype=torch.float64) for n in range(50)]
    total = torch.stack(_displacements(module, updates)).sum(0)
    wanted = torch.stack(updates).sum(0) + updates[-1] - updates[0]
    _same(total, wanted, "the sum of 50 displacements")


def _constant(module: ModuleType) -> None:
    update = _randn(4, dtype=torch.float64)
    for n, displacement in enumerate(_displacements(module, [update] * 20)):
        _same(displacement, update, f"with equal updates, displacement {n + 1}")


# clip


def _stages() -> list[list[Tensor]]:
    return [[_randn(3, 4, seed=1), _randn(5, seed=2)], [], [3 * _randn(2, 2, seed=3)], [0.01 * _randn(7, seed=4)]]


def _norm(stages: list[list[Tensor]]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for stage in stages for g in stage))


def _clipped(module: ModuleType) -> None:
    stages, norm = _stages(), _norm(_stages())
    found = module.clip_stages(stages, norm / 4)
    assert abs(found - norm) < 1e-5 * norm, f"the norm returned is {found:.4f}, over all stages it is {norm:.4f}"
    for before, after in zip(_stages(), stages, strict=True):
        for b, a in zip(before, after, strict=True):
            _same(a, b / 4, "a gradient over four times the limit")


def _untouched(module: ModuleType) -> None:
    stages, norm = _stages(), _norm(_stages())
    module.clip_stages(stages, 2 * norm)
    for before, after in zip(_stages(), stages, strict=True):
        assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True)), "a short gradient was changed"
    zero = [[torch.zeros(3)], [torch.zeros(2)]]
    module.clip_stages(zero, 1.0)
    assert all(torch.equal(g, torch.zeros_like(g)) for stage in zero for g in stage), "zero did not stay zero"


def _not_finite(module: ModuleType) -> None:
    for bad in (float("nan"), float("inf")):
        stages = _stages()
        stages[2][0][0, 0] = bad
        kept = [[g.clone() for g in stage] for stage in stages]
        found = module.clip_stages(stages, 1.0)
        assert not math.isfinite(found), f"the norm returned is {found}, with a {bad} it is not finite"
        pairs = [(b, a) for x, y in zip(kept, stages, strict=True) for b, a in zip(x, y, strict=True)]
        assert all(torch.equal(b.nan_to_num(7.0), a.nan_to_num(7.0)) for b, a in pairs), f"changed by a {bad}"


# bank


def _versions(module: ModuleType) -> None:
    banks = module.WeightBanks(torch.zeros(3))
    for version in range(1, 6):
        made = banks.publish(-torch.ones(3))
        assert made == version, f"update {version} made version {made}"
        for alive in (version - 1, version):
            _same(banks.acquire(alive) + 1, torch.full((3,), alive + 1.0), f"version {alive}, plus one")
            banks.release(alive)
        for missing in (version - 2, version + 1):
            try:
                banks.acquire(missing)
            except KeyError:
                continue
            raise AssertionError(f"version {missing} is not alive when {version} is the newest, but it was handed out")


def _in_use(module: ModuleType) -> None:
    banks = module.WeightBanks(torch.zeros(3))
    held = banks.acquire(0)
    banks.publish(torch.ones(3))
    assert torch.equal(held, torch.zeros(3)), "a version changed while a micro-batch was using it"
    try:
        banks.publish(torch.ones(3))
    except RuntimeError:
        pass
    else:
        raise AssertionError("version 0 was overwritten while in use")
    assert torch.equal(held, torch.zeros(3)), "the refused update changed a version"
    banks.release(0)
    assert banks.publish(torch.ones(3)) == 2, "after the release the update must go through"
    _same(banks.acquire(2), torch.full((3,), -2.0), "version 2")


def _two_tensors(module: ModuleType) -> None:
    banks = module.WeightBanks(torch.zeros(3))
    places = set()
    for version in range(6):
        places.add(banks.acquire(version).data_ptr())
        banks.release(version)
        banks.publish(torch.ones(3))
    assert len(places) == 2, f"six versions lay in {len(places)} places in memory; two are enough"


CHECKS = {
    "order": [
        Check("every micro-batch once, ascending", _complete, "count all forwards through, then divide by m"),
        Check("never more in flight than the depth allows", _alternating, "the last stage can turn round at once"),
        Check("no wait between batches", _no_flush, "treat all batches as one long row of micro-batches"),
    ],
    "delay": [
        Check("the weights after each update", _trajectory, "the update is built at which weights?"),
        Check("batches 0 and 1 share the first weights", _bootstrap, "max(g - 1, 0), and one update a batch"),
    ],
    "feedback": [
        Check("each displacement", _formula, "remember the update, and a copy of it"),
        Check("the sum telescopes", _telescopes, "all updates, plus the last, minus the first"),
        Check("equal updates are left alone", _constant, "what is u + (u - u)?"),
    ],
    "clip": [
        Check("one factor from the common norm", _clipped, "squares add up over stages; norms do not"),
        Check("short and zero gradients are left alone", _untouched, "min(1, ...)"),
        Check("NaN and infinity change nothing", _not_finite, "look at the norm before you use it"),
    ],
    "bank": [
        Check("two versions are alive", _versions, "version v lies in bank v modulo 2"),
        Check("a version in use is never written", _in_use, "write the new version beside, not over, the newest"),
        Check("two tensors are enough", _two_tensors, "reuse the memory of the version that is retired"),
    ],
}
