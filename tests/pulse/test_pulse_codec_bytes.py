"""The parts of a patch add up to its bytes, and what is counted as positions and values is that."""

import numpy as np
import pytest
import torch

from dist_lib.pulse import byte_accounting as accounting
from dist_lib.pulse.codecs import CODECS, Place, encode_segment
from dist_lib.pulse.sparsity_measures import reference_bits
from dist_lib.pulse.state import TensorSpec, as_words


@pytest.fixture(scope="module")
def pair():
    return accounting.settled_pair("fp32", 3e-6, cells=1 << 18)


@pytest.mark.parametrize("codec", list(CODECS))
def test_parts_add_up_to_what_is_written(pair, codec):
    old, new = pair
    found = accounting.account(old, new, codec)
    place = Place(TensorSpec(torch.bfloat16, tuple(old.shape)), 0)
    assert found.total == len(encode_segment(CODECS[codec], as_words(old), as_words(new), place))
    assert found.changed == int((old != new).sum()) and min(found.index, found.value) > 0
    assert found.header < 0.06 * found.total


def test_the_reference_splits_into_mask_and_differences(pair):
    found = accounting.reference(*pair)
    assert found.total == pytest.approx(reference_bits(*pair) / 8)
    assert found.index < 0.8 * accounting.blind_index(*pair)  # the old exponent tells much of where


def test_small_is_near_the_reference_in_both_parts(pair):
    ours, ideal = accounting.account(*pair, "small"), accounting.reference(*pair)
    assert 0.9 < ours.index / ideal.index < 1.05 and 0.8 < ours.value / ideal.value < 1.05


def test_changed_values_alone_leave_the_positions_as_they_are(pair):
    """Other differences at the same places: only the values' share moves."""
    old, new = pair
    other = new.clone()
    words = other.view(torch.int16)
    changed = old.view(torch.int16) != words
    noise = torch.randint(1, 60, old.shape, generator=torch.Generator().manual_seed(0)).to(torch.int16)
    words[changed] = old.view(torch.int16)[changed] + noise[changed]
    for codec in CODECS:
        a, b = accounting.account(old, new, codec), accounting.account(old, other, codec)
        assert a.index == b.index
        if codec != "paper":  # which writes values, not differences
            assert b.value > 1.3 * a.value


def test_layouts_keep_their_order(pair):
    found = accounting.layout_bytes(*pair)
    assert len(found) == len(accounting.LAYOUTS) + 4
    assert found["int32 index, value"] > found["int32 row and column, value"] > found["paper"] > found["fast"]
    assert found["small"] < 0.4 * found["paper"]


def test_a_figure_says_what_it_shows():
    figure = accounting.bytes_figure(cells=1 << 16)
    shown = [t for t in figure.data if t.visible]
    assert len(figure.data) == 9 and len(shown) == 3
    heights = np.sum([t.y for t in shown], 0)
    assert list(heights) == sorted(heights, reverse=True) and heights[0] == 6.0


def test_what_cannot_be_accounted_for_is_refused(pair):
    with pytest.raises(ValueError, match="no codec 'zip'"):
        accounting.account(*pair, "zip")
    with pytest.raises(ValueError, match="nothing changed"):
        accounting.account(pair[0], pair[0], "fast")
