"""Traffic, faults and link times of sparse weight sync in the ledger, computed afresh."""

from functools import cache

import pytest

from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.pulse.byte_accounting import account, settled_pair
from dist_lib.pulse.published import CELLS_7B
from tests.pulse.test_pulse_fault_matrix import publish_run, run_matrix

DEPLOYED_BYTES = 108e6  # mean patch of the paper's deployment


@cache
def _saving(storage, codec):
    old, new = settled_pair(storage, 1e-6, cells=1 << 21)
    return 2 * old.numel() / account(old, new, codec).total


@recomputes("pulse-sync-traffic")
def traffic():
    return _saving("bf16", "paper")


@recomputes("pulse-sync-traffic-master")
def traffic_master():
    return _saving("fp32", "paper")


@recomputes("pulse-sync-traffic-small")
def traffic_small():
    return _saving("fp32", "small")


@recomputes("pulse-sync-saving")
def saving():
    return 2 * CELLS_7B / DEPLOYED_BYTES


@cache
def _matrix():
    return run_matrix(publish_run())  # checks each case itself


@recomputes("pulse-sync-faults")
def faults():
    return sum(_matrix().values())


@recomputes("pulse-sync-faults-newest")
def faults_newest():
    return 100 * _matrix()["newest"] / sum(_matrix().values())


def test_the_paper_divides_by_less_than_all_weights():
    assert pytest.approx(130, abs=0.5) == 14e9 / DEPLOYED_BYTES


OURS = sorted(name for name in recomputers() if name.startswith("pulse-sync-"))


@pytest.mark.parametrize("name", OURS)
def test_the_ledger_is_what_is_computed(name):
    assert len(OURS) >= 6
    claim = load_claims()[name]
    assert recomputers()[name]() == pytest.approx(claim.our_value, rel=claim.tolerance)
