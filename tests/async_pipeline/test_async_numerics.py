"""The order of sums that the runtime and the emulator share."""

import math

import pytest
import torch
from torch import nn

from dist_lib.async_pipeline import numerics
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.emulator import DelayedTrainer


def test_batches_are_cut_into_equal_rows_in_order() -> None:
    parts = numerics.split_batch(torch.arange(12).view(6, 2), 3)
    assert [p.tolist() for p in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    for batch, m in ((torch.zeros(5, 2), 2), (torch.zeros(4), 0), (torch.zeros(()), 1), (torch.zeros(0, 2), 1)):
        with pytest.raises(ValueError, match="equal micro-batches"):
            numerics.split_batch(batch, m)


def test_gradients_are_added_in_ascending_order_and_divided_once() -> None:
    values = [1.0, 2.0**-24, 2.0**-24, 2.0**-24]  # each is lost when added to 1 in float32; in another order they count
    sums: list[torch.Tensor | None] = [None, None]
    for v in values:
        numerics.accumulate(sums, [torch.tensor([v]), None])
    assert sums[0] is not None and sums[1] is None
    assert sums[0].item() == 1.0
    numerics.average(sums, 3)
    assert sums[0].item() == torch.tensor(1.0).div(3).item()
    with pytest.raises(ValueError, match="1 gradients for 2 sums"):
        numerics.accumulate(sums, [None])


def test_half_gradients_are_added_in_float32() -> None:
    sums: list[torch.Tensor | None] = [None]
    for _ in range(300):
        numerics.accumulate(sums, [torch.tensor([1.0], dtype=torch.bfloat16)])
    assert sums[0] is not None
    assert sums[0].dtype == torch.float32
    assert sums[0].item() == 300.0


def test_given_gradients_are_not_changed() -> None:
    gradient = torch.ones(2)
    sums: list[torch.Tensor | None] = [None, None]
    numerics.accumulate(sums, [gradient, gradient.expand(2)])
    numerics.accumulate(sums, [gradient, gradient])
    numerics.average(sums, 4)
    numerics.scale(sums, torch.tensor(0.5))
    assert gradient.tolist() == [1.0, 1.0]
    assert [s.tolist() for s in sums if s is not None] == [[0.25, 0.25]] * 2


def test_two_biases_that_autograd_gives_one_gradient() -> None:
    """Their gradient is one tensor; scaled in place through both, it would be clipped twice."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.a + self.b)

    module = Sum()
    trainer = DelayedTrainer(
        [module],
        loss_fn=lambda out, y: (3 * out).sum(),
        make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], 1.0),
        config=AsyncConfig(micro_batches=1, clip_norm=3.0),
    )
    trainer.train_batch(torch.zeros(1, 2), torch.zeros(1, 2))
    assert trainer.gradient_norm is not None
    assert trainer.gradient_norm.item() == 6.0  # four entries of 3
    assert module.a.tolist() == module.b.tolist() == [-1.5, -1.5]


def test_norm_is_summed_by_stage_in_order() -> None:
    partials = [numerics.norm_partial([torch.tensor([3.0]), None]), numerics.norm_partial([torch.tensor([[4.0]])])]
    assert [p.item() for p in partials] == [9.0, 16.0]
    assert numerics.total_norm(partials).item() == 5.0
    assert numerics.norm_partial([None]).item() == 0.0
    big, small = torch.tensor(1.0), [torch.tensor(2.0**-24)] * 8  # each is lost when added to 1
    assert numerics.total_norm([big, *small]).item() == 1.0
    assert numerics.total_norm([*small, big]).item() > 1.0
    assert numerics.norm_partial([torch.full((4,), 2.0**8, dtype=torch.bfloat16)]).dtype == torch.float32


def test_clipping_only_shortens() -> None:
    assert numerics.clip_factor(torch.tensor(4.0), 1.0).item() == 0.25
    assert numerics.clip_factor(torch.tensor(0.5), 1.0).item() == 1.0
    assert numerics.clip_factor(torch.tensor(0.0), 1.0).item() == 1.0
    assert math.isnan(numerics.clip_factor(torch.tensor(float("nan")), 1.0).item())
    for bad in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="clip_norm"):
            numerics.clip_factor(torch.tensor(1.0), bad)


def test_losses_are_averaged_in_order() -> None:
    assert numerics.mean_loss([1.0, 2.0, 6.0]) == 3.0
    assert numerics.mean_loss([1e16, 1.0, -1e16]) == 0.0  # in this order
    with pytest.raises(ValueError, match="no losses"):
        numerics.mean_loss([])
