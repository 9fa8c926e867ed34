"""Traffic, faults and link times of sparse weight sync in the ledger, computed afresh."""

import json
from functools import cache
from pathlib import Path

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


@cache
def _syncs():
    record = json.loads((Path(__file__).parents[2] / "data" / "results" / "pulse-link.json").read_text())
    return {(row["mode"], row["megabits_per_s"], row["subscribers"]): row for row in record["syncs"]}


@recomputes("pulse-sync-link-saving")
def link_saving():
    return _syncs()["full", 100.0, 1]["nbytes"] / _syncs()["patch", 100.0, 1]["nbytes"]


@recomputes("pulse-sync-link-full")
def link_full():
    return _syncs()["full", 100.0, 1]["median_s"]


@recomputes("pulse-sync-link-form")
def link_form():
    """In per cent: the worst of full copies at 100 Mbit/s to one and to two subscribers, where the link decides."""
    rows = [_syncs()["full", 100.0, count] for count in (1, 2)]
    return 100 * max(abs(row["closed_form_s"] / row["median_s"] - 1) for row in rows)


def test_the_paper_divides_by_less_than_all_weights():
    assert pytest.approx(130, abs=0.5) == 14e9 / DEPLOYED_BYTES


OURS = sorted(name for name in recomputers() if name.startswith("pulse-sync-"))


@pytest.mark.parametrize("name", OURS)
def test_the_ledger_is_what_is_computed(name):
    assert len(OURS) >= 6
    claim = load_claims()[name]
    assert recomputers()[name]() == pytest.approx(claim.our_value, rel=claim.tolerance)
