"""Owner-sharded Muon under FSDP2, on 2 and 4 gloo ranks; one launch for each number of ranks."""

import pytest

from dist_lib.comm import launch
from tests.distributed.ranks_of_dmuon_fsdp import all_fsdp_bytes, all_on_four, all_on_two


@pytest.fixture(scope="module")
def two():
    return launch(all_on_two, world_size=2, timeout_s=100)


@pytest.fixture(scope="module")
def four():
    return launch(all_on_four, world_size=4, timeout_s=100)


def test_every_mode_equals_one_process(two):
    assert [found["modes"] for found in two] == [{}] * 2


def test_bytes_are_the_integers_of_the_formulas(two, four):
    assert [found["bytes"] for found in (*two, *four)] == [{}] * 6
    assert launch(all_fsdp_bytes, world_size=1, args=([(1, True, 1)],)) == [{}]


def test_replicas_and_shards_equal_one_process(four):
    assert [found["modes"] for found in four] == [{}] * 4


def test_all_modes_have_the_same_bits_with_integer_gradients(four):
    first, *others = [found["integers"] for found in four]
    assert len(first) == 5
    assert len(set(first.values())) == 1, first
    assert all(other == first for other in others)


def test_refusals(two):
    expected = {
        "mesh": "need one or two dimensions over all 2 ranks",
        "names": "mesh_dim_names",
        "precision": "use mp_policy",
        "twice": "fully_shard already",
        "state_dict": "model_state_dict",
    }
    for found in two:
        said = found["refusals"]
        assert {k: said.get(k) for k in expected if expected[k] not in said.get(k, "")} == {}
