"""Collectives on 1 to 4 gloo ranks: strides, dtypes, counts, agreement, order."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_lib.comm import AgreementError, CommCounter, ExactReducer, NetworkModel, RankError, Reducer, agree, launch
from dist_lib.comm import collectives as c

VIEWS = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.t(),
    "every second row": lambda base: base[::2],
    "one column": lambda base: base[:, 0],
    "transposed, cut": lambda base: base.t()[1:],
}


def _base(rank):
    return torch.arange(24, dtype=torch.float32).reshape(4, 6) * (rank + 1)


def strided_everything():
    """Each collective on each view, compared with the contiguous result; neighbours must keep their values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for name, view in VIEWS.items():
        inputs = [view(_base(r)).clone() for r in range(size)]
        total = torch.stack(inputs).sum(0)

        def untouched(base, seen, name=name, view=view):
            expected = _base(rank)
            view(expected).copy_(seen)
            return torch.equal(base, expected)

        base = _base(rank)
        c.all_reduce(view(base))
        if not untouched(base, total):
            wrong.append(("all_reduce", name))
        base = _base(rank)
        c.reduce(view(base), size - 1)
        if not untouched(base, total if rank == size - 1 else inputs[rank]):
            wrong.append(("reduce", name))
        base = _base(rank)
        c.broadcast(view(base), size - 1)
        if not untouched(base, inputs[size - 1]):
            wrong.append(("broadcast", name))
        if not torch.equal(c.all_gather(view(_base(rank))), torch.stack(inputs)):
            wrong.append(("all_gather", name))
        if not torch.equal(c.ordered_sum(view(_base(rank))), total):
            wrong.append(("ordered_sum", name))
        repeated = torch.cat([view(_base(rank))] * size)
        if not torch.equal(c.reduce_scatter(repeated), total):
            wrong.append(("reduce_scatter", name))
        if size > 1:
            base, to, source = _base(rank), (rank + 1) % size, (rank - 1) % size
            sent = c.isend(view(_base(rank)), to)
            c.recv(view(base), source)
            sent.wait()
            if not untouched(base, inputs[source]):
                wrong.append(("send", name))
    return wrong


def odd_cases():
    rank, size = dist.get_rank(), dist.get_world_size()
    out = {}
    parts = [torch.full((j,), float(rank), dtype=torch.float32) for j in range(size)]  # rank j gets j elements, 0 none
    out["all_to_all"] = [p.tolist() for p in c.all_to_all(parts, [rank] * size)]
    out["empty"] = c.all_gather(torch.empty(0)).shape
    half = torch.full((3,), 1.0, dtype=torch.bfloat16)
    half[0] = 256.0 if rank == 0 else 1.0  # 256 + 1 + 1 in bfloat16 is 256; in float32 it is 258
    out["bf16"] = c.all_reduce(half)[0].item()
    refused = []
    for call in (
        lambda: c.all_reduce(torch.ones(2, dtype=torch.int8)),
        lambda: c.broadcast(torch.ones(2, dtype=torch.int16), 0),
        lambda: c.all_reduce(torch.ones(2), op="mean"),
        lambda: c.reduce_scatter(torch.ones(size * 2 + 1)),
        lambda: c.isend(torch.ones(1), rank),
        lambda: c.all_to_all([torch.ones(1)], [1, 1, 1, 1, 1]),
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            refused.append(str(error))
    out["refused"] = refused
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_strides_do_not_matter(world_size):
    assert launch(strided_everything, world_size=world_size) == [[]] * world_size


def test_gloo_itself_is_wrong_on_strides():
    """The reason for this module; if this ever fails, torch has mended it."""
    assert launch(raw_gloo, world_size=2)[0] is False


def raw_gloo():
    tensor = torch.ones(4, 4).t()[1:]
    dist.all_reduce(tensor)
    return bool((tensor == 2).all())


def test_odd_sizes_and_refusals():
    for rank, out in enumerate(launch(odd_cases, world_size=3)):
        assert out["all_to_all"] == [[float(j)] * rank for j in range(3)]
        assert out["empty"] == (3, 0)
        assert out["bf16"] == 258.0
        assert len(out["refused"]) == 6
        assert "int32 or float32" in out["refused"][0] and "uint8" in out["refused"][1]


def disagree(odd):
    agree({"owners": [0, 1, 2], "odd": dist.get_rank() == odd}, what="the owner plan")
    return True


def test_agreement_raises_on_every_rank():
    assert launch(disagree, world_size=3, args=(None,)) == [True] * 3
    with pytest.raises(RankError, match=r"ranks \[1\] of 3 hold another value of the owner plan"):
        launch(disagree, world_size=3, args=(1,))
    assert launch(caught, world_size=3) == [[1]] * 3


def caught():
    try:
        disagree(1)
    except AgreementError as error:
        return error.ranks


def reduce_all(ordered):
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(size, 6 * size, 3, generator=generator)
    reducer = ExactReducer(ordered=ordered)
    assert isinstance(reducer, Reducer)
    total = inputs[0].clone()
    for row in inputs[1:]:
        total += row
    total /= size
    every = reducer.all_reduce(inputs[rank].clone())
    own = reducer.reduce_to_owner(inputs[rank].clone(), 0)
    part = reducer.reduce_scatter(inputs[rank].clone())
    want_part = total.chunk(size)[rank]
    pairs = [(every, total), (own, total if rank == 0 else inputs[rank]), (part, want_part)]
    if ordered:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("ordered", [True, False], ids=["rank order", "backend order"])
def test_reducer_equals_the_single_process_mean(ordered):
    for world_size in (1, 2, 4):
        assert all(launch(reduce_all, world_size=world_size, args=(ordered,)))


def counted():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    size = dist.get_world_size()
    with CommCounter() as counter:
        c.all_reduce(torch.ones(10))
        c.broadcast(torch.ones(7, dtype=torch.uint8), 0)
        c.all_gather(torch.ones(3))
        with CommCounter() as inner:
            c.reduce_scatter(torch.ones(size * 2))
    ours = counter.table()
    linear = torch.nn.Linear(8, 8)
    ddp = DistributedDataParallel(linear)
    with CommCounter() as counter:
        ddp(torch.ones(2, 8)).sum().backward()
    ddp_bytes = counter.bytes("all_reduce")
    sharded = fully_shard(torch.nn.Linear(8, 8, bias=False))
    with CommCounter() as counter:
        sharded(torch.ones(2, 8)).sum().backward()
    return ours, inner.table(), ddp_bytes, counter.table(), counter.records[0].group


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
