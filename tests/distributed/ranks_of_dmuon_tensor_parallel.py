"""Rank functions of the tests of Muon over tensor-parallel parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dist_lib.comm import AgreementError, CommCounter, ExactReducer, agree
from dist_lib.dmuon.tensor_parallel import TensorParallelDMuon
from dist_lib.optim import MuonWithAdamW

WIDTH, WIDE = 6, 20


class Block(nn.Module):
    """An MLP whose two matrices are cut along the long or the short dimension, one that is not cut, and a bias."""

    def __init__(self, seed, wide=WIDE):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide, bias=False), nn.Linear(wide, WIDTH, bias=False)
        self.mix, self.head_bias = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.zeros(WIDTH))
        self.idle = nn.Linear(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) * 0.4

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.mix(x)))) + self.head_bias


def made(data, tensor, *, swap=False, wide=WIDE, **options):
    """A block on a (data, tensor) mesh and its optimizer; ``swap`` cuts the short dimensions."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = Block(0, wide)
    ways = (ColwiseParallel(), RowwiseParallel())
    plan = {"mix": ways[0], "up": ways[1]} if swap else {"up": ways[0], "down": ways[1]}
    model = parallelize_module(model, mesh["tp"], plan)
    settings = {"lr": 0.02, "weight_decay": 0.1, "reducer": ExactReducer(ordered=True), **options}
    return model, TensorParallelDMuon(model, mesh, **settings)


def whole(model):
    """Full copies of all weights."""
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def twin(wide=WIDE, **options):
    """The same block on one process."""
    model = Block(0, wide)
    return model, MuonWithAdamW(model, lr=0.02, weight_decay=0.1, **options)


def whole_numbers(model, names, row, step):
    """Gradients of a row in a step: small whole numbers, whose sums are exact in any order."""
    shapes, found = {n: p.shape for n, p in model.named_parameters()}, {}
    for index, name in enumerate(names):
        generator = torch.Generator().manual_seed(1000 * step + 10 * index + row)
        found[name] = torch.randint(-8, 9, shapes[name], generator=generator).float()
    return found


def set_gradients(model, values):
    """Put gradients in place, cut as the parameters are."""
    for name, p in model.named_parameters():
        if name not in values:
            p.grad = None
        elif isinstance(p, DTensor):
            from torch.distributed.tensor import distribute_tensor

            p.grad = distribute_tensor(values[name], p.device_mesh, p.placements)
        else:
            p.grad = values[name].clone()


def bits(data, tensor, way, swap=False, wide=WIDE, steps=3):
    """Steps with gradients of whole numbers against one process: names that differ in a bit, counts, bytes."""
    model, optimizer = made(data, tensor, way=way, swap=swap, wide=wide, reducer=ExactReducer())
    reference, plain = twin(wide)
    names = [n for n, _ in reference.named_parameters() if not n.startswith("idle")]
    row = optimizer.row
    for step in range(steps):
        set_gradients(model, whole_numbers(reference, names, row, step))
        with CommCounter() as counter:
            optimizer.step()
        mean = {n: sum(whole_numbers(reference, names, r, step)[n] for r in range(data)) / data for n in names}
        for n, p in reference.named_parameters():
            p.grad = mean[n].clone() if n in mean else None
        plain.step()
    ours, expected = whole(model), dict(reference.named_parameters())
    agree(list(ours.values()), what="the weights")
    distance = max(float((ours[n] - expected[n]).abs().max()) for n in ours)
    differ = [n for n in ours if not torch.equal(ours[n], expected[n])]
    counted = {k: counter.bytes(k) for k in ("send", "reduce", "broadcast", "all_reduce") if counter.bytes(k)}
    held = {n: tuple(s["momentum_buffer"].shape) for n, p in optimizer.matrices.items() if (s := optimizer.state[p])}
    return {
        "differ": differ,
        "distance": distance,
        "histogram": optimizer.total_histogram(),
        "counted": counted,
        "formula": optimizer.payload(),
        "ways": {n: w.way for n, w in optimizer.nested.items()},
        "held": held,
        "place": (optimizer.row, optimizer.column),
    }


def learns(data, tensor, way, clip=None, steps=4):
    """Train on real batches, each data-parallel row its own part; farthest weight from one process, and norms."""
    model, optimizer = made(data, tensor, way=way)
    reference, plain = twin()
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7))
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        part = batch.chunk(data)[optimizer.row]
        (model(part) - part.flip(1)).square().mean().backward()
        plain.zero_grad()
        (reference(batch) - batch.flip(1)).square().mean().backward()
        if clip is not None:
            norms.append(
                (float(optimizer.clip_grad_norm_(clip)), float(nn.utils.clip_grad_norm_(reference.parameters(), clip)))
            )
        optimizer.step()
        plain.step()
    ours, expected = whole(model), dict(reference.named_parameters())
    return max(float((ours[n] - expected[n]).abs().max()) for n in ours), norms


def resumes(data, tensor):
    """Two steps, save, one more; a fresh optimizer that loads must take the same third step. And a wrong place."""
    model, optimizer = made(data, tensor)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))

    def step(m, o):
        o.zero_grad()
        (m(x) - x.flip(1)).square().mean().backward()
        o.step()

    for _ in range(2):
        step(model, optimizer)
    saved = torch.load(_bytes(optimizer.state_dict()), weights_only=True)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(model, optimizer)
    again, other = made(data, tensor)
    with torch.no_grad():
        for n, p in again.named_parameters():
            p.copy_(weights[n])
    other.load_state_dict(saved)
    step(again, other)
    wrong = ""
    try:
        other.load_state_dict({**saved, "layout": [[data, tensor, 5, 5], []]})
    except ValueError as error:
        wrong = str(error)
    ours, theirs = whole(model), whole(again)
    return [n for n in ours if not torch.equal(ours[n], theirs[n])], wrong


def forgets(data, tensor):
    """Clip, forget, and take a step with other gradients: it must be the step of an optimizer that never saw them."""
    ends = []
    for disturbed in (True, False):
        model, optimizer = made(data, tensor)
        values = {n: torch.ones_like(p) for n, p in whole(model).items()}
        if disturbed:
            set_gradients(model, {n: 5 * v for n, v in values.items()})
            optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        set_gradients(model, values)
        optimizer.step()
        ends.append(whole(model))
    return [n for n in ends[0] if not torch.equal(ends[0][n], ends[1][n])]


def unequal(data, tensor):
    """One rank begins with other weights; every rank's error."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = Block(int(dist.get_rank() == 1))
    try:
        TensorParallelDMuon(model, mesh)
    except AgreementError as error:
        return str(error)
    return ""


def _bytes(value):
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def faults():
    """NaN on one rank under each policy, and what is refused; messages."""
    found = {}
    for policy in ("raise", "skip"):
        model, optimizer = made(1, 2, nonfinite=policy)
        before = whole(model)
        values = {n: torch.ones_like(p) for n, p in before.items()}
        set_gradients(model, values)
        if dist.get_rank() == 1:
            model.up.weight.grad.to_local()[0, 0] = float("nan")
        try:
            optimizer.step()
            found[policy] = f"skipped {optimizer.skipped_steps}"
        except FloatingPointError as error:
            found[policy] = str(error)
        after = whole(model)
        found[policy] += "; unchanged" if all(torch.equal(before[n], after[n]) for n in before) else "; changed"
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def attempt(name, call):
        try:
            call()
        except (ValueError, TypeError) as error:
            found[name] = str(error)

    attempt("way", lambda: TensorParallelDMuon(Block(0), mesh, way="ring"))
    attempt("names", lambda: TensorParallelDMuon(Block(0), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))))
    attempt("half", lambda: TensorParallelDMuon(Block(0).bfloat16(), mesh))
    foreign = parallelize_module(Block(0), mesh["dp"], {"up": ColwiseParallel()})
    attempt("mesh", lambda: TensorParallelDMuon(foreign, mesh))
    return found
