"""Models and rank functions of the tests of owner-sharded Muon; apart from the tests, so that no rank needs pytest."""

import copy
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_lib.comm import ExactReducer
from dist_lib.comm import collectives as c
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.config import RuntimeConfig
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.optim import MuonWithAdamW, split_parameters

OPTIONS = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.9}


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding tied to the head, three blocks, one of them used twice, one weight in two layers, one frozen, one that
    nobody uses, one that only rank 0 uses."""

    def __init__(self, seed=0, width=12, odd=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Block(width, h) for h in ((20, 20, 7) if odd else (16, 16, 8)))
        self.layers[2].extra = nn.Linear(width, width, bias=False)
        self.layers[1].up.weight = self.layers[0].up.weight  # tied over two layers
        self.unused, self.sometimes = nn.Linear(width, 5, bias=False), nn.Linear(width, width, bias=False)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight
        self.skip = False

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.layers[0](x)
        x = self.layers[1](x)
        x = self.layers[0](x)
        x = self.frozen(self.layers[2](x)) + x
        if not self.skip:
            x = x + self.sometimes(x)
        return self.head(x)

    def loss(self, tokens):
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step, rank, rows=2, length=6):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 17, (rows, length), generator=g)


def random_owners(names, world, seed):
    rng = random.Random(seed)
    return {n: rng.randrange(world) for n in names}


class Reference:
    """Every rank holds everything: gradients averaged over ranks in rank order, Muon and AdamW of the library."""

    def __init__(self, model, **options):
        self.model = model
        self.optimizer = MuonWithAdamW(split_parameters(model), **{**OPTIONS, **options})

    def step(self, clip=None):
        for p in self.model.parameters():
            if not p.requires_grad:
                continue
            flag = c.all_reduce(torch.tensor([p.grad is not None], dtype=torch.int32), op="max")
            if flag.item():
                g = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = c.ordered_sum(g).div_(dist.get_world_size())
        norm = None
        if clip is not None:
            norm = nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], clip)
        self.optimizer.step()
        self.model.zero_grad()
        return norm


def differing(model, reference):
    with torch.no_grad():
        pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
        return [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]


def ranks_differ(model):
    """Names whose bits are not the same on all ranks."""
    out = []
    for name, p in model.named_parameters():
        rows = c.all_gather(p.detach())
        if not all(torch.equal(rows[0], r) for r in rows):
            out.append(name)
    return out


def build(model, *, method="lpt", owners=None, config=None, reducer=None, **options):
    plan = make_plan(split_parameters(model).muon, dist.get_world_size(), method=method, owners=owners)
    runtime = DMuonDDP(model, plan, config=config, reducer=reducer or ExactReducer(ordered=True))
    return runtime, DMuon(runtime, **{**OPTIONS, **options})


def against_reference(publish, plans, steps=5):
    """For each owner map: bits after some steps equal the reference's, on all ranks; every matrix once a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    names = [n for n, _ in split_parameters(Net()).muon]
    reference = Reference(Net(seed=3))
    for model in [reference.model]:
        model.skip = rank != 0
        for step in range(steps):
            model.loss(batch(step, rank)).backward()
            reference.step()
    for plan in plans:
        owners = random_owners(names, world, plan) if isinstance(plan, int) else None
        model = Net(seed=3 if rank == 0 else 99)  # rank 0 decides
        model.skip = rank != 0
        runtime, optimizer = build(
            model, method="lpt" if owners else plan, owners=owners, config=RuntimeConfig(publish=publish)
        )
        for step in range(steps):
            optimizer.zero_grad()
            model.loss(batch(step, rank)).backward()
            optimizer.step()
        runtime.drain()
        bad = differing(model, reference.model) + ranks_differ(model)
        histogram = optimizer.total_histogram()
        expected = {n: 0 if n in ("unused.weight", "layers.2.extra.weight") else steps for n in names}
        if bad or histogram != expected:
            found.append((plan, bad, histogram))
        runtime.close()
        copy.deepcopy(model)(batch(0, 0))
    return found
