"""The GPU check of the pipeline, run on the CPU: equal to its twin, and able to fail."""

import pytest
import torch

from dist_lib.async_pipeline.versions import WeightVersions
from labs.gpu.async_pipeline import TwoStreams, check_equal, random_batches
from labs.gpu_check import GpuReport


@pytest.fixture
def report():
    return GpuReport(say=lambda line: None)


def test_two_lanes_equal_the_twin_bit_for_bit(report):
    check_equal(report, "cpu")
    (entry,) = report.entries
    assert entry.ok and entry.values["equal"] == 21 and entry.values["apart"] == 0.0 < entry.values["moved"]


def test_a_bank_that_is_written_under_live_graphs_is_found(report, monkeypatch):
    at = WeightVersions.at

    def mixed(self, version):
        """Forwards of old versions see the newest values, as if the bank had been written in place."""
        weights = at(self, version)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(at(self, self.newest)[name])
        return weights

    monkeypatch.setattr(WeightVersions, "at", mixed)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check_equal(report, "cpu")


def test_a_lost_gradient_is_found(report, monkeypatch):
    backward = TwoStreams._backward

    def forgetful(self, action):
        backward(self, action)
        if action.batch == 2 and action.micro_batch == 1:
            self.lanes[action.stage].sums[2] = [
                None if s is None else 0.9 * s for s in self.lanes[action.stage].sums[2]
            ]

    monkeypatch.setattr(TwoStreams, "_backward", forgetful)
    check_equal(report, "cpu")
    assert report.failed


def test_batches_are_drawn_anew():
    from labs.gpu.async_pipeline import SMALL

    first, second = (random_batches(SMALL, 2, 4, "cpu") for _ in range(2))
    assert not torch.equal(first[0][0], second[0][0])
