"""Collectives on 1 to 4 gloo ranks: strides, dtypes, counts, agreement, order."""

import time

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
        base = _base(rank)
        pending = c.all_reduce(view(base), async_op=True)
        if not (torch.equal(pending.wait(), total) and untouched(base, total)):
            wrong.append(("all_reduce, async", name))
        wide = torch.full((size, *inputs[0].shape, 2), -1.0)
        c.all_gather_into(wide[..., 0], view(_base(rank)))
        if not torch.equal(wide[..., 0], torch.stack(inputs)) or not (wide[..., 1] == -1).all():
            wrong.append(("all_gather_into", name))
        # An input that is itself strided: the second half of every row pair belongs to nobody.
        blocks = torch.stack(
            [
                torch.cat([inputs[rank] + j for j in range(size)]),
                torch.zeros(()).expand(inputs[0].shape[0] * size, *inputs[0].shape[1:]),
            ],
            dim=-1,
        )[..., 0]
        assert not blocks.is_contiguous()
        if not torch.equal(c.reduce_scatter(blocks), total + rank * size):
            wrong.append(("reduce_scatter", name))
        if not torch.equal(c.all_to_all_single(blocks), torch.cat([inputs[r] + rank for r in range(size)])):
            wrong.append(("all_to_all_single", name))
        columns = torch.arange(12.0).reshape(3, 4)[:, 0] * (rank + 1)
        strided = torch.stack([columns, columns], dim=1)[:, 0]
        got = c.all_to_all([strided] * size, [3] * size)
        if not all(torch.equal(g, torch.tensor([0.0, 4.0, 8.0]) * (r + 1)) for r, g in enumerate(got)):
            wrong.append(("all_to_all", name))
        if size > 1:
            base, to, source = _base(rank), (rank + 1) % size, (rank - 1) % size
            sent = c.isend(view(_base(rank)), to)
            c.recv(view(base), source)
            sent.wait()
            if not untouched(base, inputs[source]):
                wrong.append(("send", name))
            base = _base(rank)
            coming = c.irecv(view(base), source)
            c.send(view(_base(rank)), to)
            coming.wait()
            view(base).add_(1)
            coming.wait()  # a second wait must not write again
            if not untouched(base, inputs[source] + 1):
                wrong.append(("irecv", name))
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
        lambda: c.irecv(torch.ones(1), rank),
        lambda: c.all_reduce(torch.ones(2, dtype=torch.uint8)),
        lambda: c.reduce_scatter(torch.ones(size, dtype=torch.int8)),
        lambda: c.all_gather(torch.ones(2, dtype=torch.float8_e4m3fn)),
        lambda: c.isend(torch.ones(2).to(torch.uint16), (rank + 1) % size),
        lambda: c.all_gather_into(torch.ones(size, 3), torch.ones(2)),
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
        assert len(out["refused"]) == 12
        assert "int32 or float32" in out["refused"][0] and "uint8" in out["refused"][1]


def disagree(odd):
    agree({"owners": [0, 1, 2], "odd": dist.get_rank() == odd}, what="the owner plan")
    return True


def test_agreement_raises_on_every_rank():
    assert launch(disagree, world_size=3, args=(None,)) == [True] * 3
    with pytest.raises(RankError, match=r"ranks \[1\] of 3 hold another value of the owner plan"):
        launch(disagree, world_size=3, args=(1,))
    assert launch(caught, world_size=3) == [[1]] * 3


def refuse_on(rank):
    try:
        agree({"plan": object() if dist.get_rank() == rank else 1}, what="the plan")
    except (AgreementError, TypeError) as error:
        return type(error).__name__, getattr(error, "ranks", None)


def test_a_value_that_one_rank_cannot_hash_raises_everywhere():
    begin = time.monotonic()
    assert launch(refuse_on, world_size=3, args=(2,)) == [("AgreementError", [2])] * 2 + [("TypeError", None)]
    assert time.monotonic() - begin < 20  # not after the group's timeout


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


def counted_like_torch():
    """Functional collectives, DTensor operations, clipping under FSDP2: as many as CommDebugMode sees, with bytes."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    size = dist.get_world_size()
    with CommCounter() as outer, CommCounter() as inner:
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).add(1)
    tables = [outer.table(), inner.table(), outer.records[0].group, outer.records[0].count]
    sharded = distribute_tensor(torch.ones(2 * size, 4), init_device_mesh("cpu", (size,)), [Shard(0)])
    with CommCounter() as counter:
        sharded.redistribute(placements=[Replicate()]).to_local().add(1)
    tables.append(counter.table())
    model = fully_shard(torch.nn.Linear(8, 8, bias=False))

    def step():
        model(torch.ones(2, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

    step()  # FSDP2 sets itself up in the first one
    with CommCounter() as counter:
        step()
    with CommDebugMode() as debug:
        step()
    return [*tables, counter.table(), counter.count(), debug.get_total_counts()]


def test_what_dtensors_send_is_counted():
    group = (0, 1)
    for outer, inner, seen, elements, gathered, table, count, torch_count in launch(counted_like_torch, world_size=2):
        assert outer == inner == {"all_reduce": (1, 16)} and seen == group and elements == 4
        assert gathered == {"all_gather": (1, 2 * 4 * 4)}
        assert table == {"all_gather": (1, 128), "all_reduce": (1, 4), "reduce_scatter": (1, 256)}
        assert count == torch_count == 3


def rings(elements):
    """The ring algorithms written out with sends; the counter sees what each rank really puts on its link."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    data = torch.arange(elements * size, dtype=torch.float32) + rank
    want = sum(torch.arange(elements * size, dtype=torch.float32) + r for r in range(size))
    chunks = list(data.clone().chunk(size))

    def turn(send_index, receive_index, add):
        buffer = torch.empty(elements)
        coming = c.irecv(buffer, source)
        c.send(chunks[send_index % size], to)
        coming.wait()
        chunks[receive_index % size] = chunks[receive_index % size] + buffer if add else buffer

    with CommCounter() as scatter:
        for i in range(size - 1):
            turn(rank - i, rank - i - 1, True)
    with CommCounter() as gather:
        for i in range(size - 1):
            turn(rank + 1 - i, rank - i, False)
    assert torch.equal(torch.cat(chunks), want)
    with CommCounter() as exchange:
        blocks = list(data.chunk(size))
        for i in range(1, size):
            coming = c.irecv(torch.empty(elements), (rank - i) % size)
            c.send(blocks[(rank + i) % size], (rank + i) % size)
            coming.wait()
    with CommCounter() as chain:
        if rank > 0:
            c.recv(data, rank - 1)
        if rank < size - 1:
            c.send(data, rank + 1)
    assert torch.equal(data, torch.arange(elements * size, dtype=torch.float32))
    return scatter.bytes("send"), gather.bytes("send"), exchange.bytes("send"), chain.bytes("send")


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
