"""What the ranks of test_collectives do; apart from the tests, so that no rank has to import pytest."""

import torch
import torch.distributed as dist

from dist_lib.comm import AgreementError, CommCounter, ExactReducer, Reducer, agree
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
    # 256 from one rank and 1 from each other: 258 in float32. In bfloat16 256 + 1 is 256, so that the sum is wrong
    # wherever the 256 is not added last; which rank holds it changes from element to element, whatever the chunks.
    half = torch.ones(300, dtype=torch.bfloat16)
    half[rank::size] = 256.0
    out["bf16"] = c.all_reduce(half).unique().tolist()
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


def raw_gloo():
    tensor = torch.ones(4, 4).t()[1:]
    dist.all_reduce(tensor)
    return bool((tensor == 2).all())


def disagree(odd):
    agree({"owners": [0, 1, 2], "odd": dist.get_rank() == odd}, what="the owner plan")
    return True


def refuse_on(rank):
    try:
        agree({"plan": object() if dist.get_rank() == rank else 1}, what="the plan")
    except (AgreementError, TypeError) as error:
        return type(error).__name__, getattr(error, "ranks", None)


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
