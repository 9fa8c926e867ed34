"""The closed form against the published numbers and against itself."""

import pytest

from dist_lib.pulse.timing import (
    PAPER_COMPUTE_S,
    PAPER_FULL_BYTES,
    PAPER_PATCH_BYTES,
    SyncCost,
    bandwidth_needed,
    chain_bytes,
    join_bytes,
    sync_seconds,
    utilisation,
)


def test_published_bandwidths() -> None:
    assert bandwidth_needed(PAPER_FULL_BYTES, PAPER_COMPUTE_S, 0.9) == pytest.approx(20e9)
    assert bandwidth_needed(PAPER_PATCH_BYTES, PAPER_COMPUTE_S, 0.9) == pytest.approx(0.2e9)


@pytest.mark.parametrize(
    ("bits_per_s", "nbytes", "percent"),
    [(100e6, 14e9, 4.3), (100e6, 108e6, 85.4), (200e6, 140e6, 90.0), (1e9, 14e9, 31.0), (10e9, 14e9, 81.8)],
)
def test_curve(bits_per_s: float, nbytes: float, percent: float) -> None:
    assert 100 * utilisation(PAPER_COMPUTE_S, sync_seconds(nbytes, bits_per_s)) == pytest.approx(percent, abs=0.05)


def test_bandwidth_inverts_utilisation_with_all_costs() -> None:
    cost = SyncCost(diff_s=0.1, encode_s=0.2, decode_s=0.3, apply_s=0.4, verify_s=0.5, reload_s=0.6)
    assert cost.total_s == pytest.approx(2.1)
    needed = bandwidth_needed(1e8, 50.0, 0.9, cost=cost)
    assert utilisation(50.0, sync_seconds(1e8, needed, cost=cost)) == pytest.approx(0.9)
    assert sync_seconds(1e8, 1e9, cost=cost, latency_s=0.05) == pytest.approx(0.8 + 0.05 + 2.1)
    with pytest.raises(ValueError, match="cannot be reached"):
        bandwidth_needed(1e8, 10.0, 0.9, cost=cost)


def test_chains_and_late_joins() -> None:
    assert chain_bytes([0.01] * 8, 1000, 3.0) == pytest.approx(240)
    assert join_bytes(1000, 10, 30) == 1290


def test_nonsense_is_refused() -> None:
    for call in (
        lambda: sync_seconds(1, 0),
        lambda: sync_seconds(-1, 1),
        lambda: utilisation(0, 1),
        lambda: utilisation(1, -1),
        lambda: bandwidth_needed(1, 1, 1.0),
    ):
        with pytest.raises(ValueError, match="not"):
            call()
