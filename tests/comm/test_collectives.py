"""Collectives on 1 to 4 gloo ranks: strides, dtypes, counts, agreement, order."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_lib.comm import NetworkModel, RankError, launch
from tests.comm.ranks_of_collectives import (
    caught,
    counted,
    counted_like_torch,
    disagree,
    odd_cases,
    raw_gloo,
    reduce_all,
    refuse_on,
    rings,
    strided_everything,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_strides_do_not_matter(world_size):
    assert launch(strided_everything, world_size=world_size) == [[]] * world_size


def test_gloo_itself_is_wrong_on_strides():
    """The reason for this module; if this ever fails, torch has mended it."""
    assert launch(raw_gloo, world_size=2)[0] is False


def test_odd_sizes_and_refusals():
    for rank, out in enumerate(launch(odd_cases, world_size=3)):
        assert out["all_to_all"] == [[float(j)] * rank for j in range(3)]
        assert out["empty"] == (3, 0)
        assert out["bf16"] == [258.0]
        assert len(out["refused"]) == 12
        assert "int32 or float32" in out["refused"][0] and "uint8" in out["refused"][1]


def test_agreement_raises_on_every_rank():
    assert launch(disagree, world_size=3, args=(None,)) == [True] * 3
    with pytest.raises(RankError, match=r"ranks \[1\] of 3 hold another value of the owner plan"):
        launch(disagree, world_size=3, args=(1,))
    assert launch(caught, world_size=3) == [[1]] * 3


def test_a_value_that_one_rank_cannot_hash_raises_everywhere():
    begin = time.monotonic()
    assert launch(refuse_on, world_size=3, args=(2,)) == [("AgreementError", [2])] * 2 + [("TypeError", None)]
    assert time.monotonic() - begin < 20  # not after the group's timeout


@pytest.mark.parametrize("ordered", [True, False], ids=["rank order", "backend order"])
def test_reducer_equals_the_single_process_mean(ordered):
    for world_size in (1, 2, 4):
        assert all(launch(reduce_all, world_size=world_size, args=(ordered,)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_byte_is_counted_once(world_size):
    for ours, inner, ddp_bytes, fsdp, group in launch(counted, world_size=world_size):
        assert ours == {
            "all_gather": (1, 12),
            "all_reduce": (1, 40),
            "broadcast": (1, 7),
            "reduce_scatter": (1, 8 * world_size),
        }
        assert inner == {"reduce_scatter": (1, 8 * world_size)}
        assert ddp_bytes == (64 + 8) * 4
        assert fsdp == {"all_gather": (1, 64 * 4 // world_size), "reduce_scatter": (1, 64 * 4)}
        assert group == tuple(range(world_size))


def test_what_dtensors_send_is_counted():
    group = (0, 1)
    for outer, inner, seen, elements, gathered, table, count, torch_count in launch(counted_like_torch, world_size=2):
        assert outer == inner == {"all_reduce": (1, 16)} and seen == group and elements == 4
        assert gathered == {"all_gather": (1, 2 * 4 * 4)}
        assert table == {"all_gather": (1, 128), "all_reduce": (1, 4), "reduce_scatter": (1, 256)}
        assert count == torch_count == 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_wire_bytes_are_those_of_the_algorithms(world_size):
    elements, wire = 5, NetworkModel.wire_bytes
    payload = elements * world_size * 4
    for rank, (scatter, gather, exchange, chain) in enumerate(launch(rings, world_size=world_size, args=(elements,))):
        assert scatter == wire("reduce_scatter", payload, world_size)
        assert gather == wire("all_gather", payload // world_size, world_size)
        assert scatter + gather == wire("all_reduce", payload, world_size)
        assert exchange == wire("all_to_all", payload, world_size)
        assert chain == (
            wire("broadcast", payload, world_size) if rank < world_size - 1 else 0
        )  # the last sends nothing


@given(st.integers(1, 64), st.integers(0, 10**9))
def test_network_identities(world, payload):
    net = NetworkModel(1e-5, 1e9)
    assert net.wire_bytes("all_reduce", payload, world) == 2 * net.wire_bytes("reduce_scatter", payload, world)
    shared = net.wire_bytes("all_gather", payload, world) / world
    assert shared == net.wire_bytes("reduce_scatter", payload, world)
    assert net.all_reduce(payload, 1) == 0.0
    assert net.all_reduce(payload, world + 1) > net.all_reduce(payload, world)


def test_network_refuses_nonsense():
    with pytest.raises(ValueError, match="bandwidth above 0"):
        NetworkModel(0.0, 0.0)
    with pytest.raises(ValueError, match="allowed ops"):
        NetworkModel(0.0, 1.0).time("gossip", 1, 2)
