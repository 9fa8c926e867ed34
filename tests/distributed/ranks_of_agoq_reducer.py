"""Rank functions of the tests of the 8-bit reducer: its seam, DDP, FSDP2, main gradients in 8 bits."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_lib.agoq.data_parallel import quantize_ddp_gradients, quantize_fsdp_gradients
from dist_lib.agoq.gradients import QuantizedGradients
from dist_lib.agoq.reducer import QuantizedReducer
from dist_lib.agoq.wire import GradientFormat, wire_bytes
from dist_lib.comm import AgreementError, CommCounter, ExactReducer, Reducer
from dist_lib.dmuon import DMuon, make_plan
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import split_parameters

EXACT_BELOW = 100
SHAPE = DecoderConfig(vocab_size=64, d_model=20, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=28, max_seq_len=16)


def _digest(tensors):
    data = b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(data).hexdigest()


def _error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 31, bias=False), nn.RMSNorm(31), nn.Linear(31, 7))


def _loss(model, rank, step=0):
    x = torch.randn(24, 30, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


def _exact(steps=1):
    """Mean over ranks of the gradients of a model of this process's own, summed over steps."""
    model = _model()
    for step in range(steps):
        for rank in range(dist.get_world_size()):
            (_loss(model, rank, step) / dist.get_world_size()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def the_seam():
    """The three calls, the threshold, keys, agreement."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reducer = QuantizedReducer(min_elements=EXACT_BELOW)
    values = [torch.randn(48, 50, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    exact = torch.stack(values).double().mean(0)
    found = {"protocol": isinstance(reducer, Reducer)}
    whole = reducer.all_reduce(values[rank].clone())
    found["all_reduce"] = _error(whole, exact) < 0.012
    found["sum"] = _error(reducer.all_reduce(values[rank].clone(), average=False), exact * size) < 0.012
    mine = reducer.reduce_to_owner(values[rank].clone(), 1)
    found["owner"] = torch.equal(mine, whole if rank == 1 else values[rank])
    found["scatter"] = _error(reducer.reduce_scatter(values[rank].clone()), exact.chunk(size)[rank]) < 0.008
    small = torch.full((EXACT_BELOW - 1,), 0.1 * (rank + 1))
    with CommCounter() as counter:
        reducer.all_reduce(small)
    found["exact below"] = counter.bytes("all_to_all") == 0 and counter.bytes("all_reduce") == small.nbytes
    found["exact value"] = torch.allclose(small, torch.full_like(small, 0.1 * (size + 1) / 2), rtol=1e-6)
    needs = QuantizedReducer(min_elements=0, feedback=True)
    found["key"] = "key=" in _refused(ValueError, lambda: needs.all_reduce(torch.zeros(8)))
    needs.all_reduce(torch.zeros(8), key="a")
    found["shape"] = "key of its own" in _refused(ValueError, lambda: needs.all_reduce(torch.zeros(9), key="a"))
    differs = QuantizedReducer(GradientFormat(block_size=64 if rank == 1 else 128))
    found["agree"] = "ranks [1]" in _refused(AgreementError, differs.agree)
    reducer.agree()
    nodes = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("node", "rank"))
    two = QuantizedReducer(min_elements=0, nodes=nodes)
    hopped = two.all_reduce(values[rank].clone(), group=dist.group.WORLD)
    found["nodes"] = 0 < _error(hopped, exact) < 0.015
    inside = nodes.get_group(1)
    found["nodes and group"] = "another reducer" in _refused(ValueError, lambda: two.all_reduce(hopped, group=inside))
    return found


def what_is_kept():
    """Stochastic rounding and error feedback go on after a checkpoint as if uninterrupted; wrong states are refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    form = GradientFormat(rounding="stochastic")
    make = lambda: QuantizedReducer(form, min_elements=0, feedback=True, seed=3)  # noqa: E731
    step = lambda reducer, i: reducer.all_reduce(  # noqa: E731
        torch.randn(300, generator=torch.Generator().manual_seed(10 * i + rank)), key="w"
    )
    one = make()
    for i in range(3):
        step(one, i)
    state = one.state_dict()
    two = make()
    two.load_state_dict(state)
    fresh = make()
    after = step(one, 3)
    found = {"goes on": torch.equal(after, step(two, 3)), "bytes": one.nbytes == 1200}
    found["matters"] = not torch.equal(after, step(fresh, 3))
    other = {**state, "rank": (rank + 1) % size}
    found["rank"] = "its own" in _refused(ValueError, lambda: make().load_state_dict(other))
    plain = QuantizedReducer(form, min_elements=0)
    found["feedback"] = "feedback=True" in _refused(ValueError, lambda: plain.load_state_dict(state))
    nearest = QuantizedReducer(min_elements=0, feedback=True)
    found["rounding"] = "another rounding" in _refused(ValueError, lambda: nearest.load_state_dict(state))
    one.reset()
    found["reset"] = one.nbytes == 0
    return found


def under_ddp():
    """Errors, bits and bytes of gradients; with feedback, how far their sum over steps is from the exact one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out = {}
    exact = _exact()
    for cap in (25, 0.004):
        model = DistributedDataParallel(_model(), bucket_cap_mb=cap)
        quantize_ddp_gradients(model, QuantizedReducer(min_elements=EXACT_BELOW))
        with CommCounter() as counter:
            _loss(model, rank).backward()
        grads = {name: p.grad for name, p in model.module.named_parameters()}
        out["digest", cap] = _digest(grads.values())
        out["large", cap] = max(_error(grads[n], exact[n]) for n in grads if grads[n].numel() >= EXACT_BELOW)
        out["small", cap] = max(_error(grads[n], exact[n]) for n in grads if grads[n].numel() < EXACT_BELOW)
        if cap == 25:
            blocks = sum(-(-g.numel() // 256) for g in grads.values() if g.numel() >= EXACT_BELOW)
            predicted = wire_bytes("all_reduce", size * -(-blocks // size) * 256, size)
            exact_bytes = 4 * sum(g.numel() for g in grads.values() if g.numel() < EXACT_BELOW)
            out["bytes"] = (counter.bytes("all_to_all"), counter.bytes("all_gather"), counter.bytes("all_reduce")) == (
                predicted.all_to_all,
                predicted.all_gather,
                exact_bytes,
            )
    for feedback in (False, True):
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.004)  # the buckets change after the first step
        reducer = QuantizedReducer(GradientFormat("e4m3"), min_elements=EXACT_BELOW, feedback=feedback)
        quantize_ddp_gradients(model, reducer)
        total = {n: torch.zeros(p.shape) for n, p in model.module.named_parameters()}
        for step in range(6):
            _loss(model, rank, step).backward()
            for name, p in model.module.named_parameters():
                total[name] += p.grad
            model.zero_grad()
        wanted = _exact(6)
        out["sum", feedback] = max(_error(total[n], wanted[n]) for n in total if total[n].numel() >= EXACT_BELOW)
        if feedback:
            lost = {n: t.clone() for n, t in reducer.state_dict()["residuals"].items()}
            for t in lost.values():
                dist.all_reduce(t)
            out["keys"] = sorted(lost) == sorted(n for n in total if total[n].numel() >= EXACT_BELOW)
            out["nothing lost"] = max(_error(total[n] + lost[n] / size, wanted[n]) for n in lost)
    return out


def under_fsdp():
    """Largest error of a gradient, its collectives; refusals."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = _model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = {"names": quantize_fsdp_gradients(model, QuantizedReducer(min_elements=0, feedback=True)) == ["", "0"]}
    loss = _loss(model, rank)
    with CommCounter() as counter:
        loss.backward()
    exact = _exact()
    found["error"] = max(_error(p.grad.full_tensor(), exact[n]) for n, p in model.named_parameters())
    padded = [
        size * sum(-(-p.shape[0] // size) * (p.numel() // p.shape[0]) for p in group)
        for group in (list(model[0].parameters()), [p for m in list(model)[1:] for p in m.parameters()])
    ]
    found["bytes"] = counter.bytes("all_to_all") == sum(
        wire_bytes("reduce_scatter", n, size).all_to_all for n in padded
    ) and not counter.bytes("reduce_scatter")
    found["plain"] = "fully_shard first" in _refused(
        ValueError, lambda: quantize_fsdp_gradients(_model(), QuantizedReducer())
    )
    model.set_gradient_divide_factor(1.5)
    model.set_force_sum_reduction_for_comms(True)
    model.zero_grad()
    _loss(model, rank).backward()
    last = model[4].weight
    found["factor"] = _error(last.grad.full_tensor(), exact["4.weight"] * size / 1.5) < 0.02
    model.set_force_sum_reduction_for_comms(False)
    found["premultiplied"] = "set_force_sum" in _refused(ValueError, lambda: _loss(model, rank).backward())
    return found


def main_gradients():
    """Three micro-batches a rank, then reduced: errors, bits, bytes, norms, shards, clipping."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exact = _exact(3)
    norm = torch.cat([g.flatten() for g in exact.values()]).double().norm()
    out = {}
    for limit in (2**25, 1000):
        model = _model()
        reducer = QuantizedReducer(min_elements=EXACT_BELOW)
        held = QuantizedGradients(model.named_parameters(), reducer, bucket_elements=limit)
        held.attach()

        def accumulate(held=held, model=model):
            held.reset()
            for step in range(3):
                _loss(model, rank, step).backward()

        accumulate()
        shards = held.reduce_scatter()
        shard_norm = shards.norm()
        covered = {n: torch.zeros(p.numel()) for n, p in model.named_parameters()}
        for name, (numbers, values) in shards.parts.items():
            covered[name][numbers] = values
        for name, values in shards.whole.items():
            covered[name][:] = values.flatten() if rank == 0 else 0
        for values in covered.values():
            dist.all_reduce(values)
        out["shards", limit] = max(_error(covered[n], exact[n].flatten()) for n in exact)
        out["shard norm", limit] = abs(shard_norm / float(norm) - 1)
        out["shards clipped", limit] = shards.clip_(1e-3) == shard_norm and abs(shards.norm() / 1e-3 - 1) < 1e-5
        accumulate()
        with CommCounter() as counter:
            held.all_reduce()
        lengths = [size * bucket.length for bucket in held._buckets]
        predicted = [wire_bytes("all_reduce", n, size) for n in lengths]
        out["bytes", limit] = (counter.bytes("all_to_all"), counter.bytes("all_gather")) == (
            sum(p.all_to_all for p in predicted),
            sum(p.all_gather for p in predicted),
        )
        out["buckets", limit] = len(lengths)
        found = {n: g for n, _, g in held.items()}
        out["error", limit] = max(_error(found[n], exact[n]) for n in exact)
        total = float(torch.cat([g.flatten() for g in found.values()]).double().norm())
        out["norm", limit] = abs(held.norm() / total - 1)
        out["digest", limit] = _digest(found.values()), held.norm().hex()
        held.clip_(1e-3)
        out["clipped", limit] = _digest(g for _, _, g in held.items()), abs(held.norm() / 1e-3 - 1) < 1e-5
    return out


def owner_sharded_muon():
    """Weights of a decoder after three steps: digest, and distance from those of exact reduction, relative to the way.

    The runtime knows nothing of formats: it takes a reducer.
    """
    ends = {}
    for name, reducer in (("start", None), ("exact", ExactReducer()), ("8 bits", QuantizedReducer(min_elements=0))):
        model = Decoder(SHAPE, seed=0)
        if reducer is not None:
            plan = make_plan(split_parameters(model).muon, dist.get_world_size())
            optimizer = DMuon(DMuonDDP(model, plan, reducer=reducer), lr=0.01)
            for step in range(3):
                tokens = torch.arange(18).reshape(2, 9) + dist.get_rank() + step
                model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
                optimizer.step()
        ends[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    way = (ends["exact"] - ends["start"]).norm()
    return _digest([ends["8 bits"]]), float((ends["8 bits"] - ends["exact"]).norm() / way)


def everything():
    """All of the above in one start of the ranks."""
    return {
        "seam": the_seam(),
        "kept": what_is_kept(),
        "ddp": under_ddp(),
        "fsdp": under_fsdp(),
        "main": main_gradients(),
        "muon": owner_sharded_muon(),
    }
