"""The other mitigations: each does what its formula says, and puts things back."""

import copy
import io

import pytest
import torch
from torch import nn

from dist_lib.async_pipeline.error_feedback import ErrorFeedback
from dist_lib.async_pipeline.mitigations import (
    DCASGD,
    DelayScaledLR,
    GradientExtrapolation,
    WeightPrediction,
    lr_for_delay,
)
from dist_lib.async_pipeline.wrapping import OptimizerWrapper

GRADIENTS = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5]), torch.tensor([-1.0, 1.0])]


def sgd(p: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([p], 0.1, momentum=0.9)


def updates(wrapper: type[OptimizerWrapper], **options: float) -> list[torch.Tensor]:
    """Weights after each step, without momentum: w - 0.1 (what the optimizer was fed)."""
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    o = wrapper(torch.optim.SGD([p], 0.1), **options)  # type: ignore[call-arg]
    found = [p.detach().clone()]
    for g in GRADIENTS:
        p.grad = g.clone()
        o.step()
        assert torch.equal(p.grad, g)  # put back
        found.append(p.detach().clone())
    return found


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_gradient_extrapolation(strength: float) -> None:
    w = updates(GradientExtrapolation, strength=strength)
    g = GRADIENTS
    fed = [g[0], g[1] + strength * (g[1] - g[0]), g[2] + strength * (g[2] - g[1])]
    for a, b, f in zip(w[:-1], w[1:], fed, strict=True):
        torch.testing.assert_close(a - b, 0.1 * f, rtol=1e-5, atol=1e-6)


def test_dc_asgd() -> None:
    w = updates(DCASGD, strength=0.5)
    stale = [w[0], w[0], w[1]]  # batch g is evaluated at version max(g - 1, 0)
    for n, g in enumerate(GRADIENTS):
        fed = g + 0.5 * g * g * (w[n] - stale[n])
        torch.testing.assert_close(w[n] - w[n + 1], 0.1 * fed, rtol=1e-5, atol=1e-6)


def test_extrapolating_gradients_is_error_feedback_only_for_linear_optimizers() -> None:
    """The look-alike: with SGD both give the same weights from the same gradients, with Adam they do not."""
    for make, same in ((lambda p: torch.optim.SGD([p], 0.1), True), (lambda p: torch.optim.Adam([p], 0.1), False)):
        found = []
        for wrap in (GradientExtrapolation, ErrorFeedback):
            p = nn.Parameter(torch.tensor([1.0, 2.0]))
            o = wrap(make(p), allow_momentum_free=True) if wrap is ErrorFeedback else wrap(make(p))
            for g in GRADIENTS:
                p.grad = g.clone()
                o.step()
            found.append(p.detach())
        assert torch.allclose(*found, atol=1e-6) == same


@pytest.mark.parametrize("wrapper", [GradientExtrapolation, DCASGD])
def test_resumes_and_nests(wrapper: type[GradientExtrapolation] | type[DCASGD]) -> None:
    def fresh() -> tuple[nn.Parameter, ErrorFeedback]:
        p = nn.Parameter(torch.tensor([1.0, 2.0]))
        return p, ErrorFeedback(wrapper(sgd(p), strength=0.3))

    def run(p: nn.Parameter, o: ErrorFeedback, gradients: list[torch.Tensor]) -> None:
        for g in gradients:
            p.grad = g.clone()
            o.step()

    p, o = fresh()
    run(p, o, GRADIENTS[:2])
    file = io.BytesIO()
    torch.save({"o": o.state_dict(), "p": p.detach()}, file)
    run(p, o, GRADIENTS)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    q, other = fresh()
    with torch.no_grad():
        q.copy_(saved["p"])
    other.load_state_dict(saved["o"])
    run(q, other, GRADIENTS)
    assert torch.equal(p, q)
    broken = copy.deepcopy(saved["o"])
    key = wrapper.STATE_KEY
    broken[key] = {**broken[key], "previous": {5: torch.zeros(2)}, "stale": {5: torch.zeros(2)}}
    with pytest.raises(ValueError, match="parameter 5"):
        other.load_state_dict(broken)


@pytest.mark.parametrize("wrapper", [GradientExtrapolation, DCASGD])
def test_a_parameter_without_gradient_starts_again(wrapper: type[OptimizerWrapper]) -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    o = wrapper(torch.optim.SGD([p], 0.1))
    p.grad = GRADIENTS[0].clone()
    o.step()
    p.grad = None
    held = p.detach().clone()
    o.step()
    assert torch.equal(p, held)
    p.grad = GRADIENTS[1].clone()
    o.step()
    torch.testing.assert_close(held - p.detach(), 0.1 * GRADIENTS[1])


def test_prediction_goes_on_along_the_last_update() -> None:
    w, before = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.5])
    assert torch.equal(WeightPrediction().predict(w, before, 1), torch.tensor([0.0, 1.5]))
    assert torch.equal(WeightPrediction(strength=0.5).predict(w, before, 3), torch.tensor([-0.5, 1.25]))


def test_learning_rate_for_a_delay() -> None:
    assert lr_for_delay(0.3, 0) == 0.3
    assert lr_for_delay(0.3, 1) == pytest.approx(0.15)
    assert lr_for_delay(0.3, 2) == pytest.approx(0.1)
    assert lr_for_delay(0.3, 1, step=5, anneal_steps=10) == pytest.approx(0.3 / 2**0.5)
    assert lr_for_delay(0.3, 1, step=12, anneal_steps=10) == 0.3
    p = nn.Parameter(torch.ones(1))
    o = torch.optim.SGD([p], 0.3)
    s = DelayScaledLR(o, 1, anneal_steps=2)
    rates = [o.param_groups[0]["lr"]]
    for _ in range(2):
        o.step()
        s.step()
        rates.append(o.param_groups[0]["lr"])
    assert rates == pytest.approx([0.15, 0.3 / 2**0.5, 0.3])


def test_refusals() -> None:
    p = nn.Parameter(torch.ones(2))
    for make in (
        lambda: GradientExtrapolation(sgd(p), strength=-1),
        lambda: DCASGD(sgd(p), strength=float("inf")),
        lambda: WeightPrediction(strength=-0.1),
        lambda: lr_for_delay(0.1, -1),
    ):
        with pytest.raises(ValueError, match=r"negative|at least 0"):
            make()
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        DCASGD(sgd(p)).step()
