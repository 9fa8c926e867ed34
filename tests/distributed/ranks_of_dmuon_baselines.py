"""Rank functions of the tests of what owner-sharded Muon is compared with."""

import torch.distributed as dist

from dist_lib.comm import CommCounter, ExactReducer
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.baselines import BASELINES
from dist_lib.dmuon.bytes import Sizes, rest_payload, step_payload
from dist_lib.optim import split_parameters
from tests.distributed.ranks_of_dmuon import OPTIONS, Net, Reference, batch, build, differing, ranks_differ

MODES = {"replicated": "replicated", "gather": "gather-keep", "all-to-all": "all-to-all", "owners": "ddp"}


def train(step, model, steps):
    for number in range(steps):
        model.loss(batch(number, dist.get_rank())).backward()
        step()


def against_reference(steps=3):
    """Bits, counts and bytes of every method; what is wrong, by method."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), {}
    reference = Reference(Net(seed=3))
    reference.model.skip = rank != 0
    train(reference.step, reference.model, steps)
    idle = {"unused.weight", "layers.2.extra.weight"}
    for name, kind in BASELINES.items():
        model = Net(seed=3)
        model.skip = rank != 0
        method = kind(model, reducer=ExactReducer(ordered=True), **OPTIONS)
        train(method.step, model, steps)
        wrong = ranks_differ(model)
        if name != "adamw":
            wrong += differing(model, reference.model)
            times = world if name in ("replicated", "gather") else 1
            expected = {n: 0 if n in idle else times * steps for n in method.matrices}
            wrong += [] if method.total_histogram() == expected else [method.total_histogram()]
        if wrong:
            found[name] = wrong
    return found


def bytes_of_all():
    """Bytes of one step of every method, by operation, less what the formulas say; empty if they agree."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), {}
    split = split_parameters(Net())
    plan = make_plan(split.muon, world)
    rest = rest_payload([p.numel() for _, p in split.adamw], world)
    for name, mode in MODES.items():
        model = Net(seed=1)
        if name == "owners":
            runtime, method = build(model, reducer=ExactReducer())
            flags = runtime.reduction.control_bytes + 8
        else:
            method = BASELINES[name](model, reducer=ExactReducer(), **OPTIONS)
            flags = 4 * (len(split.muon) + len(split.adamw))
        with CommCounter() as counter:
            train(method.step, model, 1)
        expected = dict(step_payload(mode, plan, Sizes(unshards=1))[rank])
        for op, n in (*rest.items(), ("all_reduce", flags)):
            expected[op] = expected.get(op, 0) + n
        table = {op: n for op, (_, n) in counter.table().items() if n}
        if table != expected:
            found[name] = (table, expected)
    return found


def everything():
    return {"reference": against_reference(), "bytes": bytes_of_all()}
