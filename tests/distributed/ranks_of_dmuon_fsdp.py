"""Rank functions of the tests of owner-sharded Muon under FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dist_lib.comm import CommCounter, ExactReducer, fingerprint
from dist_lib.comm import collectives as c
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.config import Precision, RuntimeConfig
from dist_lib.dmuon.fsdp import DMuonFSDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.optim import split_parameters
from tests.distributed.ranks_of_dmuon import OPTIONS, Net, Reference, batch, build, random_owners


class Straight(Net):
    """Every layer used; optionally recomputed in backward, layer by layer or two at once."""

    def __init__(self, seed=0, recompute=None, **kwargs):
        super().__init__(seed, **kwargs)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.recompute == "pair":
            x = checkpoint(lambda t: self.layers[1](self.layers[0](t)), x, use_reentrant=False)
            layers = [self.layers[2]]
        else:
            layers = [*self.layers]
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x + self.sometimes(x))


def whole_weights(runtime):
    """Full copies of all parameters, by name."""
    with runtime.whole():
        out = {}
        for name, p in runtime.model.named_parameters():
            out[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return out


def build_fsdp(model, *, replicas=1, reshard=True, seed=None, config=None, ordered=True, **options):
    world = dist.get_world_size()
    shape = (world,) if replicas == 1 else (replicas, world // replicas)
    split = split_parameters(model)
    owners = None if seed is None else random_owners([n for n, _ in split.muon], world, seed)
    runtime = DMuonFSDP(
        model,
        make_plan(split.muon, world, owners=owners),
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]),
        reshard_after_forward=reshard,
        reducer=ExactReducer(ordered=ordered),
        config=config,
    )
    return runtime, DMuon(runtime, **{**OPTIONS, **options})


def unequal(runtime, reference, exact):
    """Names that differ from the reference's, or between ranks."""
    ours, found = whole_weights(runtime), []
    for name, b in reference.named_parameters():
        a = ours[name]
        rows = c.all_gather(a)
        near = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        if not near or not all(torch.equal(rows[0], r) for r in rows):
            found.append((name, float((a - b).abs().max())))
    return found


def train_fsdp(case):
    """Some steps of one configuration beside the reference; what is wrong with it."""
    case = dict(case)
    kind, steps = case.pop("model", Straight), case.pop("steps", 3)
    recompute, micro, clip = case.pop("recompute", None), case.pop("micro", 1), case.pop("clip", None)
    exact = case.pop("exact", True)
    rank = dist.get_rank()
    kwargs = {"recompute": recompute} if kind is Straight else {}
    reference = Reference(kind(seed=3))
    runtime, optimizer = build_fsdp(kind(seed=3 if rank == 0 else 8, **kwargs), **case)
    wrong = []
    held = runtime.state_bytes()
    mine = [n for n in runtime.matrices if runtime.owner(n) % runtime.shards == rank % runtime.shards]
    column = sum(runtime.matrices[n].numel() for n in mine)
    if held != 4 * column:
        wrong.append(("state bytes", held, 4 * column))
    for step in range(steps):
        for part in range(micro):
            tokens = batch(10 * step + part, rank)
            reference.model.loss(tokens).backward()
            if part + 1 < micro:
                with runtime.no_sync():
                    runtime.model.loss(tokens).backward()
            else:
                runtime.model.loss(tokens).backward()
            with torch.no_grad():  # evaluation between micro-batches must not disturb anything
                runtime.model(tokens)
        if clip is not None:
            ours = optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        theirs = reference.step(clip=clip)
        if clip is not None and abs(float(ours) - float(theirs)) > 1e-6 * float(theirs):
            wrong.append(("norm", float(ours), float(theirs)))
    wrong += unequal(runtime, reference.model, exact)
    unused = {"layers.2.extra.weight", "unused.weight"}
    expected = {n: 0 if n in unused else steps for n in runtime.matrices}
    if optimizer.total_histogram() != expected:
        wrong.append(optimizer.total_histogram())
    if runtime.state_bytes() != held:
        wrong.append(("state bytes after", runtime.state_bytes(), held))
    return wrong


def all_on_two():
    """Everything that two ranks do, in one launch."""
    cases = [(1, True, 1), (1, False, 1), (1, True, 3), (1, False, 2), (2, True, 1)]
    return {"modes": every_mode_on_two(), "bytes": all_fsdp_bytes(cases), "refusals": fsdp_refusals()}


def all_on_four():
    cases = [(2, True, 1), (2, False, 2)]
    return {"modes": every_mode_on_four(), "bytes": all_fsdp_bytes(cases), "integers": integer_gradients()}


def every_mode_on_two():
    return all_of(
        [
            {},
            {"reshard": False, "seed": 5},
            {"recompute": "layer"},
            {"recompute": "pair", "steps": 2},
            {"recompute": "layer", "reshard": False},
            {"micro": 3, "seed": 1, "steps": 2},
            {"micro": 2, "reshard": False},
            {"clip": 0.05, "exact": False},
            {"model": Net, "exact": False},  # FSDP2 adds the gradients of a module used twice in another order
        ]
    )


def every_mode_on_four():
    asynchronous = RuntimeConfig(publish="async")
    return all_of(
        [
            {"replicas": 2, "exact": False},
            {"replicas": 2, "reshard": False, "exact": False, "config": asynchronous, "seed": 2, "micro": 2},
            {"replicas": 4, "exact": False, "clip": 0.1},
        ]
    )


def all_of(cases):
    return {str(case): wrong for case in cases if (wrong := train_fsdp(case))}


def fsdp_bytes(replicas, reshard, micro):
    """Payload of the matrices in the second step, by operation, and the integers it must be."""
    rank = dist.get_rank()
    runtime, optimizer = build_fsdp(
        Straight(seed=1, tied=False, odd=False), replicas=replicas, reshard=reshard, ordered=False
    )
    for step in range(2):
        with CommCounter() as counter:
            for part in range(micro):
                tokens = batch(step + part, rank)
                if part + 1 < micro:
                    with runtime.no_sync():
                        runtime.model.loss(tokens).backward()
                else:
                    runtime.model.loss(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            runtime.drain()
    sizes = {n: 4 * p.numel() for n, p in runtime.matrices.items()}
    column = sum(b for n, b in sizes.items() if runtime.owner(n) % runtime.shards == rank % runtime.shards)
    fetched = sum(sizes.values()) * micro * (2 if reshard else 1)
    expected = {
        "broadcast": fetched + (column if replicas > 1 else 0),
        "reduce": sum(sizes.values()) + (column if replicas > 1 else 0),
    }
    return {op: counter.bytes(op) - n for op, n in expected.items() if counter.bytes(op) != n}


def all_fsdp_bytes(cases):
    return {str(case): wrong for case in cases if (wrong := fsdp_bytes(*case))}


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 5))

    def forward(self, x):
        return (self.w * x).sum()


class Integers(nn.Module):
    """Three matrices whose gradients are small integers, whatever their values are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.layers = nn.ModuleList(Weighted() for _ in range(3))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def integer_gradients():
    """A fingerprint of the weights after some steps, for each mode: sums of integers are exact in any order."""
    rank, found = dist.get_rank(), {}
    modes = {
        "ddp": None,
        "shards": {"reshard": True},
        "kept": {"reshard": False, "seed": 3},
        "2 x 2": {"replicas": 2, "seed": 4},
        "4 replicas": {"replicas": 4, "config": RuntimeConfig(publish="async")},
    }
    for name, mode in modes.items():
        make, mode = (build, {"reducer": ExactReducer()}) if mode is None else (build_fsdp, {**mode, "ordered": False})
        runtime, optimizer = make(Integers(), **mode)
        for step in range(4):
            x = torch.randint(-4, 5, (6, 5), generator=torch.Generator().manual_seed(10 * step + rank)).float()
            runtime.model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = (
            {n: p.detach() for n, p in runtime.model.named_parameters()} if name == "ddp" else whole_weights(runtime)
        )
        found[name] = fingerprint(weights)
    return found


def fsdp_refusals():
    found = {}

    def attempt(name, make):
        try:
            make()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    three = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    attempt("mesh", lambda: DMuonFSDP(Straight(), mesh=three))
    attempt("names", lambda: DMuonFSDP(Straight(), mesh=init_device_mesh("cpu", (1, 2))))
    half = RuntimeConfig(precision=(Precision("norm", torch.bfloat16),))
    attempt("precision", lambda: DMuonFSDP(Straight(), config=half))
    runtime = DMuonFSDP(Straight())
    attempt("twice", lambda: DMuonFSDP(runtime.model))
    attempt("state_dict", runtime.model.state_dict)
    return found
