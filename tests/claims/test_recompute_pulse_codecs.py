"""Sizes of coded patches in the ledger, computed afresh on synthetic AdamW streams."""

from functools import lru_cache

import pytest

from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.pulse.byte_accounting import account, accounts, blind_index, layout_bytes, reference, settled_pair


@lru_cache(maxsize=4)
def _pair(storage, lr, cells=1 << 21):
    return settled_pair(storage, lr, cells=cells)


@lru_cache(maxsize=2)
def _paper():
    """The paper's format where 0.85 % change: BF16-stored, 2^22 weights."""
    old, new = _pair("bf16", 3e-6, 1 << 22)
    return old.numel(), account(old, new, "paper")


@lru_cache(maxsize=2)
def _layouts():
    return layout_bytes(*_pair("bf16", 3e-6, 1 << 22))


@recomputes("pulse-codec-paper-bytes")
def paper_bytes():
    return _paper()[1].per_change


@recomputes("pulse-codec-paper-ratio")
def paper_ratio():
    cells, coded = _paper()
    return 2 * cells / coded.total


@recomputes("pulse-codec-fast-bytes")
def fast_bytes():
    return account(*_pair("fp32", 1e-6), "fast").per_change


@recomputes("pulse-codec-small-bytes")
def small_bytes():
    return account(*_pair("fp32", 1e-6), "small").per_change


@recomputes("pulse-codec-small-ratio")
def small_ratio():
    old, new = _pair("fp32", 1e-6)
    return 2 * old.numel() / account(old, new, "small").total


@recomputes("pulse-codec-small-over-reference")
def small_over_reference():
    """The worst of the three streams."""
    found = []
    for pair in (_pair("fp32", 1e-6), _pair("fp32", 3e-6), _pair("bf16", 3e-6, 1 << 22)):
        *_, small, ideal = accounts(*pair)
        found.append(small.total / ideal.total)
    return max(found)


@recomputes("pulse-codec-index-bits")
def index_bits():
    old, new = _pair("fp32", 1e-6)
    changed = reference(old, new).changed
    return f"{8 * blind_index(old, new) / changed:.1f} and {8 * reference(old, new).index / changed:.1f}"


@recomputes("pulse-codec-value-bits")
def value_bits():
    ideal = [reference(*_pair(*stream)) for stream in (("fp32", 1e-6), ("bf16", 3e-6, 1 << 22))]
    return f"{8 * ideal[0].value / ideal[0].changed:.1f} and {8 * ideal[1].value / ideal[1].changed:.1f}"


@recomputes("pulse-codec-plain-bytes")
def plain_bytes():
    return _layouts()["int32 index, value"]


@recomputes("pulse-codec-mask-bytes")
def mask_bytes():
    return _layouts()["bit mask, value"]


@recomputes("pulse-codec-xor-bytes")
def xor_bytes():
    return _layouts()["XOR of all cells"]


@recomputes("pulse-codec-gap-bytes")
def gap_bytes():
    return _layouts()["byte gap, value"]


MINE = sorted(name for name, function in recomputers().items() if function.__module__ == __name__)


@pytest.mark.parametrize("claim_id", MINE)
def test_ledger_holds_what_the_code_gives(claim_id):
    claim, value = load_claims()[claim_id], recomputers()[claim_id]()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"


def test_sizes_stay_in_the_bands_they_are_known_for():
    assert len(MINE) == 12 and 75 < paper_ratio() < 82 and 2.95 < paper_bytes() < 3.05
    assert small_bytes() < 1.0 and small_over_reference() < 1.1
    assert small_bytes() < 0.4 * account(*_pair("fp32", 1e-6), "paper").per_change
    assert fast_bytes() < 0.6 * account(*_pair("fp32", 1e-6), "paper").per_change
