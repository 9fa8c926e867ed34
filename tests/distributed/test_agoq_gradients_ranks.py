"""Gradients summed through 8 bits, on 1 to 4 ranks: bits, error, bytes, odd sizes, bad numbers, what is kept back."""

from functools import lru_cache

import pytest

from dist_lib.comm import launch
from tests.distributed.ranks_of_agoq_gradients import everything


@lru_cache(maxsize=4)
def run(world):
    """Each number of ranks is started once for all tests here."""
    return launch(everything, world_size=world, timeout_s=120)


WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
SEVERAL = pytest.mark.parametrize("world", [2, 3, 4])


@WORLDS
def test_bits_error_and_bytes_at_every_size(world):
    for found in zip(*(rank["sizes"] for rank in run(world)), strict=True):
        case = found[0]["case"]
        assert len({f["digest"] for f in found}) == 1, case
        for f in found:
            assert f["in_place"] and f["simulated"], case
            assert f["excess"] <= 1, case
            assert f["counted"] == f["predicted"], case
            assert f["dtypes"] <= {"torch.uint8"} and f["calls"] == (0 if world == 1 or case[0] == 0 else 2), case


@WORLDS
def test_reduce_and_reduce_scatter_and_strides_and_dtypes(world):
    results = [rank["calls"] for rank in run(world)]
    for key in results[0]:
        values = [r[key] for r in results]
        if key[0] == "same":
            assert len(set(values)) == 1, key
        else:
            assert all(values), key


@SEVERAL
def test_pieces_overlap_and_change_nothing(world):
    for rank in run(world):
        assert not [case for case, good in rank["pieces"].items() if not good]


@SEVERAL
def test_a_bad_block_is_nan_everywhere_and_no_other(world):
    for rank in run(world):
        bad = rank["bad"]
        assert bad["poisoned"] == [0, 3]
        assert bad["infinite"] == 0
        assert bad["rest"] == pytest.approx([world - 1], rel=0.01)
        assert bad["residual"] and bad["zero"]


@SEVERAL
def test_error_feedback_loses_nothing(world):
    results = [rank["feedback"] for rank in run(world)]
    for name in results[0]:
        assert len({r[name][2] for r in results}) == 1
        for gap, distance, _ in (r[name] for r in results):
            assert gap < 1e-5
            assert distance < 0.01


def test_two_hops_over_nodes():
    results = [rank["nodes"] for rank in run(4)]
    for key in set().union(*results):
        values = [r[key] for r in results if key in r]
        if key[0] == "digest":
            assert len(set(values)) == 1, key
        else:
            assert all(values), key
