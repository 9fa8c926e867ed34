"""The model of a training step behind the cover: schedules, shares and bytes against independent arithmetic."""

import itertools
import math

import pytest

from dist_lib.comm import NetworkModel
from dist_lib.models import get_config, parameter_counts
from dist_lib.step_model import (
    METHODS,
    Scenario,
    activation_layer_units,
    newton_schulz_flops_of_model,
    one_forward_one_backward,
    patch_bytes,
    step_bytes,
    timeline,
)


@pytest.mark.parametrize("stages,micro_batches", [(1, 1), (2, 2), (4, 4), (4, 8), (3, 7)])
def test_a_flushed_pipeline_takes_m_plus_p_minus_1(stages: int, micro_batches: int) -> None:
    segments = one_forward_one_backward(stages, micro_batches, 1.0, 2.0)
    assert len(segments) == 2 * stages * micro_batches
    assert max(s.end for s in segments) == (micro_batches + stages - 1) * 3.0


def test_lanes_never_do_two_things_at_once() -> None:
    for method in METHODS:
        step = timeline(method, Scenario())
        for lane in {s.lane for s in step.segments}:
            row = sorted((s for s in step.segments if s.lane == lane), key=lambda s: s.start)
            for before, after in itertools.pairwise(row):
                assert after.start >= before.end - 1e-9, (method, lane, before, after)


def test_devices_are_accounted_for_in_every_method() -> None:
    for method in METHODS:
        step = timeline(method, Scenario())
        kinds = {s.kind for s in step.segments if s.lane.startswith("stage")}
        assert math.isclose(sum(step.share(kind) for kind in kinds), 1.0, rel_tol=1e-9), method


def test_only_the_delay_removes_the_bubble() -> None:
    scenario = Scenario(network=NetworkModel(0.0, 1e30), memory_bytes_per_s=1e30)
    p, m = scenario.stages, scenario.micro_batches
    assert timeline("baseline", scenario).share("idle") == pytest.approx((p - 1) / (m + p - 1))
    assert timeline("async", scenario).share("idle") == pytest.approx(0.0, abs=1e-9)
    ratio = timeline("baseline", scenario).step_s / timeline("async", scenario).step_s
    assert ratio == pytest.approx((m + p - 1) / m)


def test_each_paper_changes_its_own_bytes() -> None:
    scenario = Scenario()
    base = step_bytes("baseline", scenario)
    assert step_bytes("muon", scenario) == base
    quantised = step_bytes("agoq", scenario)
    assert base.gradients / quantised.gradients == pytest.approx(4 / (1 + 4 / 128))
    assert base.activations / quantised.activations > 3
    assert step_bytes("pulse", scenario).sampler < base.sampler / 50
    assert step_bytes("pulse", scenario).gradients == base.gradients
    assert step_bytes("async", scenario).second_weights == pytest.approx(base.sampler / scenario.stages)


def test_activation_units_give_the_published_totals() -> None:
    config = get_config("llama2-7b")
    wide = type(config)(**{**vars(config), "d_ff": 4 * config.d_model})
    assert activation_layer_units(wide) == 28
    assert activation_layer_units(wide, quantised_bits=4) == 7.75


def test_newton_schulz_counts_products() -> None:
    config = get_config("tiny-0.3m")
    total = 0
    for rows, cols in [(96, 96)] * 2 + [(48, 96)] * 2 + [(256, 96)] * 3:
        m, n = min(rows, cols), max(rows, cols)
        total += 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)  # X X^T, its square, and the product with X
    assert newton_schulz_flops_of_model(config) == config.n_layers * total


def test_a_patch_needs_its_values_and_its_positions() -> None:
    n, p = 1000, 0.25
    positions = math.log2(math.comb(n, int(n * p))) / 8  # naming one subset of that size
    assert patch_bytes(n, p) == pytest.approx(2 * n * p + positions, rel=0.01)


def test_scenario_refuses_what_cannot_run() -> None:
    with pytest.raises(ValueError, match="micro-batches"):
        Scenario(stages=8, micro_batches=4)
    with pytest.raises(ValueError, match="allowed are"):
        timeline("adafactor", Scenario())
    assert parameter_counts(Scenario().config).total > 6e9
