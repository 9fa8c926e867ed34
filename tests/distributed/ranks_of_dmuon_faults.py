"""Rank functions of the tests of owner-sharded Muon: long runs, faults, refusals, events, odd shapes."""

import copy
import os
import random

import torch
import torch.distributed as dist
from torch import nn

from dist_lib.comm import ExactReducer
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.config import Precision, RuntimeConfig
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.optim import Muon, split_parameters
from tests.distributed.ranks_of_dmuon import OPTIONS, Net, batch, build, differing, ranks_differ


def long_run(steps):
    """Bits on all ranks are equal after every step, while buffers of random sizes come and go between the steps."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = [nn.Linear(10, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False), nn.Tanh(), nn.Linear(10, 3)]
    model = nn.Sequential(*layers)
    runtime, optimizer = build(model, reducer=ExactReducer(), config=RuntimeConfig(publish="async"), lr=3e-3)
    rng, kept, losses, unequal = random.Random(rank), [], [], 0
    for step in range(steps):
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(1000 * (step % 7) + rank))
        loss = (model(x) - x[:, :3].sin()).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        kept.append(torch.full((rng.randrange(1, 5000),), float("nan")))
        optimizer.step()
        if len(kept) > 5:
            del kept[rng.randrange(len(kept))]
        optimizer.zero_grad()
        if step % 10 == 0 or step + 1 == steps:
            runtime.drain()
            unequal += bool(ranks_differ(model))
    histogram = optimizer.total_histogram()
    return unequal, sum(losses[:7]) / sum(losses[-7:]), set(histogram.values())


def disagree(kind):
    """Rank 1 builds something else than the others."""
    model, odd = Net(), dist.get_rank() == 1
    names = [n for n, _ in split_parameters(model).muon]
    owners = {n: int(odd and kind == "owners") for n in names}
    config = RuntimeConfig(publish="async" if odd and kind == "config" else "sync")
    if odd and kind == "model":
        model.frozen = nn.Linear(12, 13).requires_grad_(False)
    if odd and kind == "unsupported":
        model.embed.sparse = True
    if odd and kind == "options":
        build(model, owners=owners, momentum=0.5)
    build(model, owners=owners, config=config)


def disagreements():
    """What each kind raises, on this rank."""
    found = {}
    for kind in ("owners", "config", "model", "unsupported", "options"):
        try:
            disagree(kind)
        except Exception as error:
            found[kind] = type(error).__name__
    return found


def one_dies(step_of_death):
    """Rank 1 ends in the middle of a step."""
    model = Net()
    _, optimizer = build(model)
    for step in range(4):
        model.loss(batch(step, dist.get_rank())).backward()
        if step == step_of_death and dist.get_rank() == 1:
            os._exit(3)
        optimizer.step()
        optimizer.zero_grad()


def refusals():
    """The message of each thing that must be refused before training."""
    world = dist.get_world_size()
    found = {}

    def attempt(name, make):
        try:
            make()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def changed(change):
        model = Net()
        return change(model) or model

    split = split_parameters(Net())
    attempt("ddp", lambda: DMuonDDP(nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)))
    attempt("compiled", lambda: DMuonDDP(torch.compile(Net())))
    attempt("sparse", lambda: DMuonDDP(changed(lambda m: setattr(m.embed, "sparse", True))))
    attempt("meta", lambda: DMuonDDP(changed(lambda m: m.to("meta"))))
    attempt("frozen", lambda: DMuonDDP(changed(lambda m: m.requires_grad_(False))))
    attempt("world", lambda: DMuonDDP(Net(), make_plan(split.muon, world + 1)))
    attempt("other model", lambda: DMuonDDP(Net(width=8), make_plan(split.muon, world)))
    attempt("split", lambda: DMuonDDP(Net(), split=split))
    attempt("layer_of", lambda: DMuonDDP(Net(), layer_of=lambda name: "layers"[: len(name) % 7]))
    attempt("publish", lambda: RuntimeConfig(publish="later"))
    attempt("dtype", lambda: Precision("x", torch.int8))
    attempt("pattern", lambda: Precision("("))
    model = Net()
    model.unused.requires_grad_(False)
    model.layers[2].extra.requires_grad_(False)
    runtime = DMuonDDP(model)
    attempt("option", lambda: DMuon(runtime, rho=1))
    attempt("negative", lambda: DMuon(runtime, lr=-1.0))
    attempt("twice", lambda: DMuon(runtime, groups=[{"params": ["layers.0.up.weight"] * 2}]))
    attempt("unknown", lambda: DMuon(runtime, groups=[{"params": ["nobody"]}]))
    optimizer = DMuon(runtime, **OPTIONS)
    attempt("state_dict", optimizer.state_dict)
    attempt("load_state_dict", lambda: optimizer.load_state_dict({}))
    attempt("add", lambda: optimizer.add_param_group({"params": []}))
    attempt("norm", lambda: optimizer.clip_grad_norm_(0.0))
    model.loss(batch(0, 0)).backward()
    optimizer.zero_grad()  # forgets a backward, on every rank alike
    found["forgotten"] = runtime.gradient("layers.0.up.weight") is None and not runtime.reduction.begun
    loss = model.loss(batch(0, 0))
    hook = model.layers[1].norm.weight.register_hook(lambda g: 1 / 0)  # when layer 2 has gone
    attempt("broken", loss.backward)
    attempt("clear", optimizer.zero_grad)
    hook.remove()
    optimizer.clip_grad_norm_(1.0)
    attempt("again", lambda: runtime.model.loss(batch(0, 0)).backward())
    runtime.publish()
    optimizer.zero_grad()
    return found


def timeline():
    """Events of two asynchronous steps, of all ranks."""
    model = Net(seed=6)
    runtime, optimizer = build(model, config=RuntimeConfig(publish="async", record=True))
    for step in range(2):
        model.loss(batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime.drain()
    layers = [g.layer for g in runtime.groups]
    return layers, {g.layer: g.publish_bytes for g in runtime.groups}, runtime.log.gather()


def shapes(cases):
    """Single rows and columns, primes, one element: owners' results as one process, for each list of shapes."""
    rank, wrong = dist.get_rank(), []
    for case in cases:
        torch.manual_seed(7)
        model = nn.Module()
        model.ws = nn.ParameterList(nn.Parameter(torch.randn(*s)) for s in case)
        model.forward = lambda x, model=model: sum((w * torch.full_like(w, x).cumsum(1)).sum() for w in model.ws)
        twin = copy.deepcopy(model)
        split = split_parameters(model, rule=lambda n, p: "muon")
        runtime = DMuonDDP(model, split=split, reducer=ExactReducer(ordered=True))
        optimizer = DMuon(runtime, **OPTIONS)
        muon = Muon(list(twin.ws), **OPTIONS)
        for step in range(3):
            model(float(rank + step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            grads = [
                [torch.full_like(w, float(r + step + 1)).cumsum(1) for w in twin.ws] for r in range(runtime.world_size)
            ]
            for i, w in enumerate(twin.ws):
                w.grad = sum(g[i] for g in grads) / runtime.world_size
            muon.step()
        if differing(model, twin) or ranks_differ(model):
            wrong.append(case)
    return wrong
