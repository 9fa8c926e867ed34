"""Error feedback: its algebra in float64, and that it is an optimizer like any other."""

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.error_feedback import ErrorFeedback, configured
from dist_lib.async_pipeline.wrapping import momentum_of
from dist_lib.optim import Muon, MuonWithAdamW


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in ((4, 6), (6, 3), (5,))]


def fill(ps: list[nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(1000 + step)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) + 0.3 * p.detach()


def adamw(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ps, 0.01, betas=(0.9, 0.95), weight_decay=0.1)


class StoresTheDisplacement(ErrorFeedback):
    """The fault: it remembers what it applied."""

    def _correct(self, p: Tensor, before: Tensor) -> None:
        super()._correct(p, before)
        self._previous[p].copy_(before - p)

    def _is_plain(self, p: Tensor) -> bool:
        return False


def delayed_run(make: Callable[[list[nn.Parameter]], ErrorFeedback], steps: int = 200) -> tuple[float, float]:
    """Follow a smooth function with gradients one update old; largest errors of the y-form and of the cumulative sum.

    The y-form: y_n = x_n + u_n obeys y_n = y_{n-1} - u_n from the second update on. The sum: after n updates the
    displacement is u_1 + ... + u_n, and u_n - u_1.
    """
    p = nn.Parameter(torch.linspace(-2, 2, 7, dtype=torch.float64))
    optimizer = make([p])
    start, stale = p.detach().clone(), p.detach().clone()
    total, first, y_before = torch.zeros_like(start), torch.zeros_like(start), torch.zeros_like(start)
    worst_y, worst_sum = 0.0, 0.0
    for n in range(1, steps + 1):
        p.grad = stale.sin() + 0.1 * stale
        before = p.detach().clone()
        clean = copy.deepcopy(optimizer)  # what the optimizer alone would do, here and now
        clean.param_groups[0]["params"][0].grad = p.grad.clone()
        clean.optimizer.step()
        u = before - clean.param_groups[0]["params"][0].detach()
        stale = before
        optimizer.step()
        total += u
        first = u if n == 1 else first
        y = p.detach() + u
        if n > 1:
            worst_y = max(worst_y, float((y - (y_before - u)).abs().max()))
        worst_sum = max(worst_sum, float((start - p.detach() - (total + u - first)).abs().max()))
        y_before = y
    return worst_y, worst_sum


def test_y_form_and_cumulative_identity() -> None:
    y, total = delayed_run(lambda ps: ErrorFeedback(torch.optim.Adam(ps, 0.02)))
    assert y < 1e-12
    assert total < 1e-12


def test_storing_the_displacement_breaks_both() -> None:
    y, total = delayed_run(lambda ps: StoresTheDisplacement(torch.optim.Adam(ps, 0.02)))
    assert y > 1e-3
    assert total > 1e-3


def test_constant_gradient_with_sgd_is_the_plain_run() -> None:
    plain, corrected = parameters(), parameters()
    a = torch.optim.SGD(plain, 0.1)
    b = ErrorFeedback(torch.optim.SGD(corrected, 0.1), allow_momentum_free=True)
    for _ in range(20):
        for ps, o in ((plain, a), (corrected, b)):
            for p in ps:
                p.grad = torch.ones_like(p)
            o.step()
    for p, q in zip(plain, corrected, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_first_update_is_uncorrected_and_the_second_doubled() -> None:
    plain, corrected = parameters(), parameters()
    a, b = adamw(plain), ErrorFeedback(adamw(corrected))
    fill(plain, 0), fill(corrected, 0)
    a.step(), b.step()
    assert all(torch.equal(p, q) for p, q in zip(plain, corrected, strict=True))
    w1 = [p.detach().clone() for p in plain]
    u1 = [b.previous_update(q).clone() for q in corrected]
    fill(plain, 1), fill(corrected, 1)
    a.step(), b.step()
    for p, q, w, u in zip(plain, corrected, w1, u1, strict=True):
        u2 = w - p.detach()
        torch.testing.assert_close(q.detach(), w - 2 * u2 + u, rtol=0, atol=1e-14)
        torch.testing.assert_close(b.previous_update(q), u2, rtol=0, atol=0)


def test_weight_decay_is_inside_the_update() -> None:
    p = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
    optimizer = ErrorFeedback(torch.optim.SGD([p], 0.1, momentum=0.9, weight_decay=0.5))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.previous_update(p), torch.full((3,), 0.1, dtype=torch.float64))


def test_a_strength_of_zero_is_the_optimizer_alone_and_half_is_half() -> None:
    runs = {}
    for strength in (None, 0.0, 0.5, 1.0):
        ps = parameters()
        o = adamw(ps) if strength is None else ErrorFeedback(adamw(ps), strength=strength)
        for step in range(2):
            fill(ps, 0) if step == 0 else [setattr(p, "grad", p.grad * -1) for p in ps]
            o.step()
        runs[strength] = ps[0].detach()
    assert torch.equal(runs[None], runs[0.0])
    torch.testing.assert_close(runs[0.5], (runs[0.0] + runs[1.0]) / 2, rtol=0, atol=1e-14)
    assert not torch.equal(runs[1.0], runs[0.0])


def test_a_parameter_without_gradient_is_left_alone_and_forgets() -> None:
    ps = parameters()
    o = ErrorFeedback(adamw(ps))
    for step in range(3):
        fill(ps, step)
        o.step()
    held = ps[1].detach().clone()
    assert o.previous_update(ps[1]).abs().max() > 0
    fill(ps, 3)
    ps[1].grad = None
    o.step()
    assert torch.equal(ps[1], held)
    assert torch.equal(o.previous_update(ps[1]), torch.zeros_like(held))
    fill(ps, 4)
    before = ps[1].detach().clone()
    o.step()
    torch.testing.assert_close(before - ps[1].detach(), 2 * o.previous_update(ps[1]), rtol=0, atol=1e-14)


def _makers() -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    import pytorch_optimizer as package

    def combined(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        model = nn.Module()
        model.matrix, model.other, model.norm = ps
        return MuonWithAdamW(model, 0.01, nonfinite="skip")

    def normuon(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        return package.NorMuon(
            [{"params": ps[:2], "use_muon": True}, {"params": ps[2:], "use_muon": False, "betas": (0.9, 0.95)}]
        )

    return {
        "AdamW": adamw,
        "NAdam": lambda ps: torch.optim.NAdam(ps, 0.01),
        "SGD": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9),
        "Muon": lambda ps: Muon(ps[:2], 0.01),
        "MuonWithAdamW": combined,
        "Lion": lambda ps: package.Lion(ps, 0.01),
        "Adan": lambda ps: package.Adan(ps, 0.01),
        "SOAP": lambda ps: package.SOAP(ps, 0.01),
        "MARS": lambda ps: package.MARS(ps, 0.01),
        "NorMuon": normuon,
    }


@pytest.mark.parametrize("name", list(_makers()))
def test_around_every_optimizer(name: str) -> None:
    """Updates with the formula, under a scheduler, and goes on from a checkpoint bit for bit."""
    make = _makers()[name]

    def run(o: ErrorFeedback, ps: list[nn.Parameter], s: torch.optim.lr_scheduler.LRScheduler, steps: range) -> None:
        for step in steps:
            fill(ps, step)
            o.step()
            s.step()
            o.zero_grad()
            assert all(p.grad is None for group in o.param_groups for p in group["params"])

    def fresh() -> tuple[list[nn.Parameter], ErrorFeedback, torch.optim.lr_scheduler.LRScheduler]:
        ps = parameters(torch.float32)
        o = ErrorFeedback(make(ps))
        return ps, o, torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t))

    ps, o, s = fresh()
    assert isinstance(o, torch.optim.Optimizer)
    lr = o.param_groups[0]["lr"]
    run(o, ps, s, range(4))
    assert math.isclose(o.param_groups[0]["lr"], lr / 5)
    file = io.BytesIO()
    torch.save({"o": o.state_dict(), "p": [p.detach() for p in ps], "s": s.state_dict()}, file)
    run(o, ps, s, range(4, 8))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    ps2, o2, s2 = fresh()
    with torch.no_grad():
        for p, value in zip(ps2, saved["p"], strict=True):
            p.copy_(value)
    o2.load_state_dict(saved["o"])
    s2.load_state_dict(saved["s"])
    run(o2, ps2, s2, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(ps, ps2, strict=True))

    plain = parameters(torch.float32)
    alone = make(plain)
    fill(plain, 0)
    alone.step()
    before = [p.detach().clone() for p in plain]
    fill(plain, 1)
    alone.step()
    ps3 = parameters(torch.float32)
    corrected = ErrorFeedback(make(ps3))
    first = []
    for step in range(2):
        first = [p.detach().clone() for p in ps3]
        fill(ps3, step)
        corrected.step()
    start = parameters(torch.float32)
    for p, q, w, x0, now in zip(plain, ps3, before, start, first, strict=True):
        torch.testing.assert_close(now, w, rtol=0, atol=0)
        u1, u2 = x0.detach() - w, w - p.detach()
        torch.testing.assert_close(q.detach(), w - 2 * u2 + u1, rtol=1e-5, atol=1e-6)


def test_a_step_that_the_optimizer_skips_changes_nothing() -> None:
    ps = parameters()[:2]
    o = ErrorFeedback(Muon(ps, 0.01, nonfinite="skip"))
    for step in range(2):
        fill(ps, step)
        o.step()
    held, remembered = [p.detach().clone() for p in ps], [o.previous_update(p).clone() for p in ps]
    fill(ps, 2)
    ps[0].grad[0, 0] = float("nan")
    o.step()
    assert all(torch.equal(p, q) for p, q in zip(ps, held, strict=True))
    assert all(torch.equal(o.previous_update(p), q) for p, q in zip(ps, remembered, strict=True))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda ps: torch.optim.SGD(ps, 0.1), "momentum 0"),
        (lambda ps: torch.optim.Adam(ps, 0.1, betas=(0.0, 0.9)), "momentum 0"),
        (lambda ps: torch.optim.Adagrad(ps), "no option"),
        (lambda ps: torch.optim.RMSprop(ps), "momentum 0"),
        (lambda ps: torch.optim.SGD([{"params": ps[:1]}, {"params": ps[1:], "momentum": 0}], momentum=0.9), "group 1"),
    ],
)
def test_refuses_optimizers_without_momentum(make: Callable[..., torch.optim.Optimizer], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        ErrorFeedback(make(parameters()))
    ErrorFeedback(make(parameters()), allow_momentum_free=True)


def test_refuses_what_it_cannot_wrap() -> None:
    with pytest.raises(TypeError, match="LBFGS"):
        ErrorFeedback(torch.optim.LBFGS(parameters()))
    with pytest.raises(TypeError, match="wraps a torch"):
        ErrorFeedback(parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strength"):
        ErrorFeedback(adamw(parameters()), strength=-1.0)
    with pytest.raises(ValueError, match="dtype"):
        ErrorFeedback(adamw(parameters()), dtype=torch.int8)


def test_momentum_by_the_names_of_options() -> None:
    assert momentum_of({"momentum": 0.9}) == 0.9
    assert momentum_of({"betas": (0.95, 0.99)}) == 0.95
    assert momentum_of({"beta1": None}) == 0.0
    assert momentum_of({"lr": 0.1}) is None


def test_remembered_dtype_rounds_and_is_kept_in_the_checkpoint() -> None:
    ps = parameters(torch.float32)
    o = ErrorFeedback(adamw(ps), dtype=torch.bfloat16, strength=0.75)
    exact_ps = parameters(torch.float32)
    exact = ErrorFeedback(adamw(exact_ps), strength=0.75)
    for step in range(3):
        for optimizer, q in ((o, ps), (exact, exact_ps)):
            fill(q, step)
            optimizer.step()
    assert all(o.previous_update(p).dtype == torch.bfloat16 for p in ps)
    for p, q in zip(ps, exact_ps, strict=True):
        assert 0 < float((p - q).detach().abs().max()) < 2 * 0.01 * 2**-8  # a rounding of updates of about lr
    other = ErrorFeedback(adamw(parameters(torch.float32)))
    other.load_state_dict(o.state_dict())
    assert (other.strength, other.dtype) == (0.75, torch.bfloat16)


def test_half_precision_parameters_are_corrected_in_float32() -> None:
    ps = parameters(torch.bfloat16)
    o = ErrorFeedback(torch.optim.SGD(ps, 0.05, momentum=0.9))
    for step in range(2):
        fill(ps, step)
        before = [p.detach().clone() for p in ps]
        remembered = [o.previous_update(p) for p in ps]
        remembered = [r.clone() if r is not None else None for r in remembered]
        o.step()
    for p, b, r in zip(ps, before, remembered, strict=True):
        assert o.previous_update(p).dtype == torch.float32
        after = b.float() - o.previous_update(p)  # exact: both are differences of bfloat16 numbers
        assert torch.equal(p.detach(), (after + (r - o.previous_update(p))).bfloat16())


def test_closure_runs_once_and_with_gradients() -> None:
    p = nn.Parameter(torch.ones(3))
    o = ErrorFeedback(torch.optim.SGD([p], 0.1, momentum=0.9))
    calls = []

    def closure() -> Tensor:
        o.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(1)
        return loss

    assert o.step(closure).item() == 3.0
    assert calls == [1]
    assert float(p.detach()[0]) == pytest.approx(0.8)


def test_a_group_added_later_starts_uncorrected() -> None:
    ps = parameters()
    o = ErrorFeedback(torch.optim.SGD(ps[:2], 0.1, momentum=0.9))
    fill(ps, 0)
    o.step()
    o.add_param_group({"params": ps[2:]})
    before = ps[2].detach().clone()
    fill(ps, 1)
    gradient = ps[2].grad.clone()
    o.step()
    torch.testing.assert_close(before - ps[2].detach(), 0.1 * gradient)
    with pytest.raises(ValueError, match="the new group"):
        o.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 0.0})
    assert len(o.param_groups) == 2


def test_copies_are_independent() -> None:
    ps = parameters()
    o = ErrorFeedback(adamw(ps))
    torch.optim.lr_scheduler.StepLR(o, 1)  # replaces o.step by a closure
    fill(ps, 0)
    o.step()
    twin = copy.deepcopy(o)
    held = ps[0].detach().clone()
    twin_p = twin.param_groups[0]["params"][0]
    twin_p.grad = torch.ones_like(twin_p)
    twin.step()
    assert torch.equal(ps[0], held)
    assert not torch.equal(twin_p, held)


def test_state_of_another_kind_is_refused_before_anything_changes() -> None:
    ps = parameters()
    o = ErrorFeedback(adamw(ps))
    fill(ps, 0)
    o.step()
    good = copy.deepcopy(o.state_dict())
    with pytest.raises(ValueError, match="saved without ErrorFeedback"):
        o.load_state_dict(adamw(parameters()).state_dict())
    bad = copy.deepcopy(good)
    bad["error_feedback"]["previous"][0] = torch.zeros(1)
    with pytest.raises(ValueError, match="parameter 0"):
        o.load_state_dict(bad)
    bad = copy.deepcopy(good)
    bad["error_feedback"]["first_update"] = "corrected"
    with pytest.raises(ValueError, match="first_update"):
        o.load_state_dict(bad)
    assert torch.equal(o.previous_update(ps[0]), good["error_feedback"]["previous"][0])


def test_one_extra_copy_at_most_while_it_steps() -> None:
    """Peak of live tensor memory over a step, by the bytes that the allocator hands out."""
    p = nn.Parameter(torch.zeros(1 << 20))
    o = ErrorFeedback(torch.optim.SGD([p], 0.1, momentum=0.9))
    p.grad = torch.ones_like(p)
    for _ in range(2):
        o.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        o.step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert p.nbytes <= peak < 1.1 * p.nbytes
    assert abs(live) < 0.1 * p.nbytes


def test_configured_wraps_once() -> None:
    off, on = AsyncConfig(micro_batches=1), AsyncConfig(micro_batches=1, error_feedback=True, ef_strength=0.5)
    inner = adamw(parameters())
    assert configured(inner, off) is inner
    wrapped = configured(inner, on)
    assert isinstance(wrapped, ErrorFeedback)
    assert wrapped.strength == 0.5
    with pytest.raises(ValueError, match="already"):
        configured(wrapped, on)
