"""Models and rank functions of the tests of owner-sharded Muon; apart from the tests, so that no rank needs pytest."""

import copy
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_lib.comm import CommCounter, ExactReducer
from dist_lib.comm import collectives as c
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.config import Precision, RuntimeConfig
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.optim import Muon, MuonWithAdamW, split_parameters

ROUTES = ("muon", "adamw")
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

    def __init__(self, seed=0, width=12, odd=True, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Block(width, h) for h in ((20, 20, 7) if odd else (16, 16, 8)))
        self.layers[2].extra = nn.Linear(width, width, bias=False)
        if tied:
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


def lively(seed):
    """A net whose layers can all be reduced during backward."""
    model = Net(seed=seed)
    for layer in (model.unused, model.layers[2].extra):
        layer.requires_grad_(False)
    return model


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


def same_as(model, reference):
    return differing(model, reference.model) == [] and ranks_differ(model) == []


def accumulation(publish):
    """Three micro-batches in no_sync and a fourth: bits of local sums; which parameters are used changes each time."""
    rank = dist.get_rank()
    reference, model = Reference(lively(1)), lively(1)
    runtime, optimizer = build(model, config=RuntimeConfig(publish=publish))
    with CommCounter() as quiet:
        pass
    for step in range(3):
        for micro in range(4):
            tokens = batch(10 * step + micro, rank)
            for m in (model, reference.model):
                m.skip = (rank + step + micro) % 3 != 0
            reference.model.loss(tokens).backward()
            if micro < 3:
                with CommCounter() as counter, runtime.no_sync():
                    model.loss(tokens).backward()
                if step == 0:
                    quiet.records += counter.records
            else:
                model.loss(tokens).backward()
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    runtime.drain()
    return same_as(model, reference) and not quiet.records


def two_synchronised_backwards():
    """Without no_sync the second backward's gradients follow the first's to the owner; equal up to rounding."""
    rank = dist.get_rank()
    reference, model = Reference(lively(1)), lively(1)
    runtime, optimizer = build(model)
    for micro in range(2):
        reference.model.loss(batch(micro, rank)).backward()
        model.loss(batch(micro, rank)).backward()
    optimizer.clip_grad_norm_(float("inf"))
    local = {n: p.grad.clone() for n, p in reference.model.named_parameters() if p.grad is not None}
    means = {n: c.all_reduce(g) / dist.get_world_size() for n, g in local.items()}
    errors = [float((runtime.gradient(n) - means[n]).norm() / means[n].norm()) for n in runtime.reduction.gradients]
    return len(errors) == sum(n in means for n in runtime.owned) and max(errors, default=0.0) < 1e-6


def clipping(max_norm):
    rank = dist.get_rank()
    reference, model = Reference(Net(seed=2)), Net(seed=2)
    _, optimizer = build(model)
    worst = 0.0
    for step in range(3):
        for m in (reference.model, model):
            m.loss(batch(step, rank)).backward()
        ours = optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        theirs = reference.step(clip=max_norm)
        worst = max(worst, float((ours - theirs).abs() / theirs))
    pairs = zip(model.parameters(), reference.model.parameters(), strict=True)
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
    return worst < 1e-6 and close and ranks_differ(model) == []


def nonfinite(policy, where):
    """One rank's gradient of one parameter is infinite: nobody changes anything, everybody knows."""
    model = Net(seed=2)
    runtime, optimizer = build(model, nonfinite=policy, config=RuntimeConfig(overlap=False))
    before = copy.deepcopy(model)
    model.loss(batch(0, dist.get_rank())).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        p = dict(model.named_parameters())[where]
        p.grad.view(-1)[0] = float("inf")
    raised = False
    try:
        optimizer.step()
    except FloatingPointError:
        raised = True
    unchanged = differing(model, before) == [] and not optimizer.total_histogram()["layers.0.up.weight"]
    optimizer.zero_grad()
    model.loss(batch(1, dist.get_rank())).backward()
    optimizer.step()  # and training goes on
    runtime.drain()
    return unchanged and raised == (policy == "raise") and ranks_differ(model) == [] and differing(model, before) != []


def schedules_and_groups():
    """A scheduler and per-group options reach the owners: as two optimizers of one process with the same options."""
    rank = dist.get_rank()
    model, twin = Net(seed=4), Net(seed=4)
    special = ["layers.0.up.weight", "layers.2.norm.weight"]
    _, optimizer = build(model, groups=[{"params": special, "name": "slow", "lr": 0.003, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + t))
    split = split_parameters(twin)
    chosen = {k: [[p for n, p in getattr(split, k) if (n in special) == s] for s in (True, False)] for k in ROUTES}
    slow = {"lr": 0.003, "weight_decay": 0.0}
    muon = Muon([{"params": chosen["muon"][0], **slow}, {"params": chosen["muon"][1]}], **OPTIONS)
    adamw = torch.optim.AdamW(
        [{"params": chosen["adamw"][0], **slow}, {"params": chosen["adamw"][1]}],
        lr=OPTIONS["lr"],
        betas=(0.9, 0.95),
        weight_decay=OPTIONS["weight_decay"],
    )
    reference = Reference(twin)
    reference.optimizer = type("Both", (), {"step": lambda self: (muon.step(), adamw.step())})()
    rates = [g["lr"] for o in (muon, adamw) for g in o.param_groups]
    for step in range(3):
        for m in (model, twin):
            m.loss(batch(step, rank)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        reference.step()
        for rate, g in zip(rates, [g for o in (muon, adamw) for g in o.param_groups], strict=True):
            g["lr"] = rate / (2 + step)
    real = {id(p) for g in optimizer.param_groups for p in g["params"]} <= {id(p) for p in model.parameters()}
    return same_as(model, reference) and real and next(g["name"] for g in optimizer.param_groups) == "slow/muon"


def half_precision():
    """bfloat16 weights of some layers, float32 masters at the owners: as a float32 optimizer beside a rounded model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False), nn.Linear(12, 4))
    start = copy.deepcopy(model)
    config = RuntimeConfig(precision=(Precision(r"^[01]\.", torch.bfloat16, torch.float32),), publish="async")
    split = split_parameters(model, rule=lambda n, p: "muon" if p.ndim == 2 else None)
    plan = make_plan(split.muon, world)
    runtime = DMuonDDP(model, plan, split=split, config=config, reducer=ExactReducer(ordered=True))
    optimizer = DMuon(runtime, **OPTIONS)
    masters, shown = start, copy.deepcopy(start)
    inner = Reference(masters)
    inner.optimizer = MuonWithAdamW(
        split_parameters(masters, rule=lambda n, p: "muon" if p.ndim == 2 else None), **OPTIONS
    )
    for step in range(4):
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(10 * step + rank))
        for p, q in zip(shown.parameters(), masters.parameters(), strict=True):
            p.data = q.detach().to(torch.bfloat16 if q.shape in ((20, 12), (12, 20)) else torch.float32)
        for m in (shown, model):
            m[2](m[1](m[0](x.bfloat16())).float()).square().mean().backward()
        for p, q in zip(shown.parameters(), masters.parameters(), strict=True):
            q.grad, p.grad = p.grad.float(), None
        inner.step()
        optimizer.step()
        optimizer.zero_grad()
    runtime.drain()
    good = [torch.equal(p, q.to(p.dtype)) for p, q in zip(model.parameters(), masters.parameters(), strict=True)]
    kept = all(torch.equal(m, dict(masters.named_parameters())[n]) for n, m in runtime.masters.items())
    return all(good) and kept and all(m.dtype == torch.float32 for m in runtime.masters.values())


def message_sizes(config):
    """Bytes of one step, by operation, and the integers they must be."""
    world = dist.get_world_size()
    model = Net(seed=6)
    runtime, optimizer = build(model, reducer=ExactReducer(), config=config)
    with CommCounter() as counter:
        model.loss(batch(0, dist.get_rank())).backward()
        optimizer.step()
        runtime.drain()
    split = split_parameters(model)
    matrices = sum(p.numel() for _, p in split.muon)
    chunks = sum(-(-p.numel() // world) for _, p in split.adamw)
    flags = len(split.muon) + len(split.adamw) + len(runtime.groups) + 2
    expected = {
        "all_gather": 4 * chunks,
        "all_reduce": 4 * flags,
        "broadcast": 4 * matrices,
        "reduce": 4 * matrices,
        "reduce_scatter": 4 * chunks * world,
    }
    calls = sum(len(g.packs) for g in runtime.groups)
    found = counter.table()
    return {op: n for op, (_, n) in found.items()} == expected and found["reduce"][0] == found["broadcast"][0] == calls


def every_feature():
    """Name and outcome of each check, one launch for all."""
    checks = {
        "accumulation": lambda: accumulation("sync"),
        "accumulation, async": lambda: accumulation("async"),
        "two backwards": two_synchronised_backwards,
        "clipping": lambda: clipping(0.05),
        "clipping, nothing to do": lambda: clipping(1e6),
        "skip, matrix": lambda: nonfinite("skip", "layers.2.up.weight"),
        "raise, vector": lambda: nonfinite("raise", "layers.0.norm.bias"),
        "schedules": schedules_and_groups,
        "half precision": half_precision,
        "bytes": lambda: message_sizes(RuntimeConfig()),
        "bytes, late reduce, async": lambda: message_sizes(RuntimeConfig(overlap=False, publish="async")),
        "bytes, one message a matrix": lambda: message_sizes(RuntimeConfig(packed=False)),
    }
    return {name: check() for name, check in checks.items()}
