"""Rank functions of the tests of gradients summed through 8 bits."""

import hashlib
import math
from unittest import mock

import torch
import torch.distributed as dist

from dist_lib.agoq import collectives
from dist_lib.agoq.wire import GradientFormat, wire_bytes
from dist_lib.comm import CommCounter
from dist_lib.ops import CODECS

SIZES = (0, 1, 5, 127, 128, 129, 1000)
FORMS = (GradientFormat(), GradientFormat("dynamic8", 128), GradientFormat("e4m3", 64))


def gradient(rank, numel, seed=0):
    """A gradient of rank ``rank`` with blocks of very different magnitude."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scale = 10.0 ** torch.linspace(-6, 2, max(numel, 1))[:numel]
    return torch.randn(numel, generator=generator) * scale


def digest(tensor):
    """The bits of a tensor."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def excess(result, inputs, form, op, parts):
    """Largest error over its bound; blocks as the shards have them."""
    size, numel = len(inputs), result.numel()
    length = math.ceil(numel / parts)
    exact = torch.stack([t.double() for t in inputs]).sum(0)
    half = CODECS[form.codec].half_gap * (1 + 1e-5)
    worst = 0.0
    for start in range(0, numel, length):
        for low in range(start, min(start + length, numel), form.block_size):
            span = slice(low, min(low + form.block_size, start + length, numel))
            sent = sum(float(t[span].abs().max()) for t in inputs)
            bound = half * sent + half * (float(exact[span].abs().max()) + half * sent)
            worst_here = (result[span].double() * (size if op == "mean" else 1) - exact[span]).abs().max()
            worst = max(worst, float(worst_here) / bound)
    return worst


def sizes_and_forms():
    """For each size and format: whether the simulation's bits came out, the error over its bound, digests, bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out = []
    for numel in SIZES:
        for form in FORMS:
            for op in ("sum", "mean"):
                inputs = [gradient(r, numel) for r in range(size)]
                mine = inputs[rank].clone()
                with CommCounter() as counter:
                    result = collectives.all_reduce(mine, op=op, form=form)
                predicted = wire_bytes("all_reduce", numel, size, form)
                out.append(
                    {
                        "case": (numel, form.codec, op),
                        "in_place": result is mine,
                        "simulated": torch.equal(
                            mine, collectives.simulate_all_reduce(inputs, op=op, form=form) if size > 1 else inputs[0]
                        ),
                        "excess": excess(mine, inputs, form, op, size) if numel and size > 1 else 0.0,
                        "digest": digest(mine),
                        "counted": (counter.bytes("all_to_all"), counter.bytes("all_gather"), counter.bytes()),
                        "predicted": (
                            predicted.all_to_all,
                            predicted.all_gather,
                            predicted.all_to_all + predicted.all_gather,
                        ),
                        "dtypes": {str(r.dtype) for r in counter.records},
                        "calls": counter.count(),
                    }
                )
    return out


def other_calls():
    """Reduce and reduce-scatter against the all-reduce and the exact sum; strides; dtypes; refusals."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    inputs = [gradient(r, 1000) for r in range(size)]
    whole = collectives.all_reduce(inputs[rank].clone(), op="mean")
    for owner in range(size):
        mine = inputs[rank].clone()
        with CommCounter() as counter:
            collectives.reduce(mine, owner, op="mean")
        found["reduce", owner] = torch.equal(mine, whole if rank == owner else inputs[rank])
        found["reduce bytes", owner] = counter.bytes() == wire_bytes("reduce", 1000, size).all_to_all
    matrices = [gradient(r, 24 * 50).view(24, 50) for r in range(size)]
    with CommCounter() as counter:
        part = collectives.reduce_scatter(matrices[rank])
    found["scatter bytes"] = counter.bytes() == wire_bytes("reduce_scatter", 1200, size).all_to_all
    exact = torch.stack(matrices).double().sum(0).chunk(size)[rank]
    bound = CODECS["int8"].half_gap * 1.001 * sum(float(m.chunk(size)[rank].abs().max()) for m in matrices)
    found["scatter"] = part.shape == exact.shape and float((part - exact).abs().max()) <= bound
    room = torch.full((20, 30), 7.0)
    for name, view in (("t", room.t()[:5]), ("step", room[::2]), ("column", room[:, 0])):
        room.fill_(7.0)
        values = gradient(rank, view.numel(), seed=3).view(view.shape)
        view.copy_(values)
        expected = collectives.all_reduce(values.clone())
        collectives.all_reduce(view)
        touched = torch.equal(view, expected)
        view.fill_(7.0)
        found["strides", name] = touched and bool((room == 7.0).all())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        values = gradient(rank, 300, seed=4).to(dtype)
        collectives.all_reduce(values, op="mean")
        found["dtype", str(dtype)] = values.dtype == dtype and bool(values.isfinite().all())
        found["same", str(dtype)] = digest(values)
    try:
        collectives.all_reduce(torch.ones(8, dtype=torch.int8))
    except TypeError as error:
        found["int8"] = "not summed through 8 bits" in str(error)
    return found


def bad_numbers():
    """One rank has a NaN, one an infinity, one only zeros: where the result is NaN; and whether residuals are clean."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.zeros(size * 512) if rank == 0 else torch.ones(size * 512)
    if rank == 0:
        values[3] = float("nan")
    if rank == size - 1:
        values[512 + 300] = -float("inf")
    residual = torch.zeros_like(values)
    collectives.all_reduce(values, residual=residual)
    zero = collectives.all_reduce(torch.zeros(100), op="mean")
    return {
        "poisoned": sorted({int(i) // 256 for i in values.isnan().nonzero()}),
        "infinite": int(values.isinf().sum()),
        "rest": values[1024:].unique().tolist() if size > 2 else [float(size - 1)],
        "residual": bool(residual.isfinite().all()),
        "zero": bool((zero == 0).all()),
    }


def feedback(steps):
    """Sum of results and of what went in, over steps, less what residuals hold; with and without two hops."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    out = {}
    groups = {"flat": None}
    if size == 4:
        groups["nodes"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    for name, group in groups.items():
        residual, got, given = torch.zeros(777), torch.zeros(777).double(), torch.zeros(777).double()
        for step in range(steps):
            mine = gradient(rank, 777, seed=step)
            given += torch.stack([gradient(r, 777, seed=step) for r in range(size)]).double().sum(0)
            got += collectives.all_reduce(mine, op="mean", group=group, residual=residual).double() * size
        held = residual.double()
        dist.all_reduce(held)
        scale = given.abs() + held.abs() + 10.0 ** torch.linspace(-6, 2, 777)
        out[name] = (
            float(((given - got - held) / scale).abs().max()),
            float((given - got).norm() / given.norm()),
            digest(got),
        )
    return out


def by_nodes():
    """Two hops on a mesh of (2, 2): calls against the exact sum, digests, bytes."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("node", "rank"))
    found = {}
    for numel in SIZES:
        inputs = [gradient(r, numel) for r in range(size)]
        mine = inputs[rank].clone()
        with CommCounter() as counter:
            collectives.all_reduce(mine, group=mesh)
        found["digest", numel] = digest(mine)
        predicted = wire_bytes("all_reduce", numel, size, ranks_per_node=2, hops=2)
        found["bytes", numel] = (counter.bytes("all_to_all"), counter.bytes("all_gather")) == (
            predicted.all_to_all,
            predicted.all_gather,
        )
        found["bound", numel] = excess(mine, inputs, GradientFormat(), "sum", size) < 2 if numel else True
        for owner in (0, size - 1):
            target = inputs[rank].clone()
            with CommCounter() as counter:
                collectives.reduce(target, owner, group=mesh)
            found["reduce", numel, owner] = torch.equal(target, mine if rank == owner else inputs[rank])
            if rank // 2 != owner // 2:
                predicted = wire_bytes("reduce", numel, size, ranks_per_node=2, hops=2)
                found["reduce bytes", numel, owner] = counter.bytes() == predicted.all_to_all
    rows = [torch.full((size, 3), float(r + 1)) * torch.arange(size)[:, None] for r in range(size)]
    part = collectives.reduce_scatter(rows[rank], group=mesh)
    total = sum(range(1, size + 1)) * rank
    found["scatter"] = bool(((part - total).abs() <= 0.03 * max(total, 1)).all())
    return found


def in_pieces():
    """A tensor of several pieces, whole, short at its end, in steps and in bfloat16, against the simulation in one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    with mock.patch.object(collectives, "PIECE", 256):
        for numel in (size * 256 + 1, size * 1024, 4001):
            inputs = [gradient(r, numel, seed=5) for r in range(size)]
            for form in FORMS:
                mine = inputs[rank].clone()
                with CommCounter() as counter:
                    same = collectives.all_reduce(mine, op="mean", form=form) is mine
                expected = collectives.simulate_all_reduce(inputs, op="mean", form=form)
                predicted = wire_bytes("all_reduce", numel, size, form)
                sent = counter.bytes() == predicted.all_to_all + predicted.all_gather
                pieces = math.ceil(math.ceil(numel / size) / 256)
                found[numel, form.codec] = same and torch.equal(mine, expected) and sent
                found[numel, form.codec, "calls"] = counter.count() == 2 * pieces > 2
            room = torch.full((numel, 2), 7.0)
            room[:, 0] = inputs[rank]
            collectives.all_reduce(room[:, 0])
            expected = collectives.simulate_all_reduce(inputs)
            found[numel, "strides"] = torch.equal(room[:, 0], expected) and bool((room[:, 1] == 7.0).all())
            half = collectives.all_reduce(inputs[rank].bfloat16())
            expected = collectives.simulate_all_reduce([t.bfloat16() for t in inputs])
            found[numel, "bfloat16"] = torch.equal(half, expected)
    return found


def everything():
    """All of the above in one start of the ranks."""
    size = dist.get_world_size()
    return {
        "sizes": sizes_and_forms(),
        "calls": other_calls(),
        "pieces": in_pieces() if size > 1 else None,
        "bad": bad_numbers() if size > 1 else None,
        "feedback": feedback(12) if size > 1 else None,
        "nodes": by_nodes() if size == 4 else None,
    }
