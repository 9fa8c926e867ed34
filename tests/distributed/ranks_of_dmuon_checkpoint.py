"""Rank functions of the tests of checkpoints of owner-sharded Muon."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from dist_lib.comm import fingerprint
from dist_lib.dmuon import checkpoint as ck
from dist_lib.dmuon.config import Precision, RuntimeConfig
from tests.distributed.ranks_of_dmuon import Net, batch, build, random_owners, ranks_differ, split_parameters
from tests.distributed.ranks_of_dmuon_fsdp import Straight, build_fsdp, whole_weights

HALF = RuntimeConfig(precision=(Precision(r"layers\.0\.", torch.bfloat16),), publish="async")


class Mixed(Net):
    """With a running buffer, and layer 0 in whatever type its weights have."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.layers[0](x.to(self.layers[0].up.weight.dtype)).float()
        return self.head(self.frozen(self.layers[2](x)) + x)


def make(mode, seed, owner_seed):
    if mode.startswith("fsdp"):
        replicas = 2 if mode == "fsdp 2d" else 1
        return build_fsdp(Straight(seed=seed), seed=owner_seed, replicas=replicas)
    names = [n for n, _ in split_parameters(Mixed(tied=False)).muon]
    owners = random_owners(names, dist.get_world_size(), owner_seed)
    return build(Mixed(seed=seed, tied=False), owners=owners, config=HALF)


def advance(runtime, optimizer, first, last):
    """Steps on data that do not depend on the number of ranks: every rank takes the whole batch, so means are exact."""
    for step in range(first, last):
        loss = runtime.model.loss(batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(runtime.model, "seen"):
            runtime.model.seen += step


def weights(runtime, optimizer):
    """Fingerprint of all weights and masters of all ranks, and of the momentum by name."""
    runtime.drain()
    if runtime.mode == "fsdp":
        shown = whole_weights(runtime)
    else:
        assert not ranks_differ(runtime.model)
        shown = {n: t.detach() for n, t in runtime.model.state_dict().items()}
    own = [
        {
            n: (fingerprint(m.detach()), fingerprint(optimizer.muon.state[m]["momentum_buffer"]))
            for n, m in runtime.masters.items()
            if "momentum_buffer" in optimizer.muon.state[m]
        }
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own[0])
    merged = dict(sorted((k, v) for part in everyone for k, v in part.items()))
    return fingerprint({n: shown[n] for n in sorted(shown)}), fingerprint([[k, list(v)] for k, v in merged.items()])


def save_and_go_on(root, mode):
    """Two steps, save, three more; what the weights are then."""
    runtime, optimizer = make(mode, seed=1, owner_seed=7)
    advance(runtime, optimizer, 0, 2)
    optimizer.param_groups[0]["lr"] = 0.013
    folder = ck.save_checkpoint(Path(root) / mode, runtime, optimizer, step=2, extra={"epoch": 5})
    advance(runtime, optimizer, 2, 5)
    return weights(runtime, optimizer), str(folder)


def load_and_go_on(root, mode, owner_seed):
    """Load into a model with other weights and another owner map; three steps."""
    runtime, optimizer = make(mode, seed=9, owner_seed=owner_seed)
    advance(runtime, optimizer, 0, 1)
    step, extra = ck.load_checkpoint(Path(root) / mode, runtime, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    seen = runtime.model.seen.tolist() if hasattr(runtime.model, "seen") else [1.0]
    advance(runtime, optimizer, 2, 5)
    return weights(runtime, optimizer), (step, extra, lr, seen[0])


def save_all(root, modes):
    """Save, and load on the same ranks with other owners."""
    saved = {mode: save_and_go_on(root, mode)[0] for mode in modes}
    return saved, load_all(root, modes, 8)


def load_all(root, modes, owner_seed):
    return {mode: load_and_go_on(root, mode, owner_seed) for mode in modes}


def killed_while_saving(root):
    """Save once; die in the middle of the second save, with data already written."""
    runtime, optimizer = make("ddp", seed=1, owner_seed=7)
    advance(runtime, optimizer, 0, 1)
    ck.save_checkpoint(root, runtime, optimizer, step=1)
    advance(runtime, optimizer, 1, 2)
    if dist.get_rank() == 1:
        real = state_dict_saver.save

        def half(*args, **kwargs):
            real(*args, **kwargs)
            os._exit(3)

        state_dict_saver.save = half
    ck.save_checkpoint(root, runtime, optimizer, step=2)


def odds_and_ends(root):
    """What is kept and refused, and the exchange of weights between modes."""
    found = {}

    def attempt(name, act):
        try:
            act()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    runtime, optimizer = make("ddp", seed=1, owner_seed=7)
    root = Path(root)
    attempt("nothing", lambda: ck.load_checkpoint(root / "empty", runtime, optimizer))
    for step in (1, 2, 3):
        advance(runtime, optimizer, step, step + 1)
        ck.save_checkpoint(root, runtime, optimizer, step=step)
    found["kept"] = sorted(p.name for p in root.iterdir())
    attempt("exists", lambda: ck.save_checkpoint(root, runtime, optimizer, step=3))
    attempt("extra", lambda: ck.save_checkpoint(root, runtime, optimizer, step=4, extra={"x": torch.ones(2)}))
    runtime.model.loss(batch(0, 0)).backward()
    runtime.finish_backward()
    attempt("between", lambda: ck.save_checkpoint(root, runtime, optimizer, step=5))
    optimizer.zero_grad()
    other, its = build(Mixed(width=8, tied=False), config=HALF)
    attempt("other model", lambda: ck.load_checkpoint(root, other, its))
    sharded, inner = build_fsdp(Straight(seed=4))
    attempt("other mode", lambda: ck.load_checkpoint(root, sharded, inner))
    plain, _ = build(Straight(seed=5))
    ck.load_model_state_dict(sharded, ck.model_state_dict(plain))
    advance(sharded, inner, 0, 1)
    start = ck.model_state_dict(plain)
    moved = ck.model_state_dict(sharded)
    ck.load_model_state_dict(plain, moved)
    again = ck.model_state_dict(plain)
    found["exchange"] = all(torch.equal(moved[n], again[n]) for n in moved) and set(moved) == set(start)
    found["changed"] = not torch.equal(start["layers.0.up.weight"], moved["layers.0.up.weight"])
    attempt("missing", lambda: ck.load_model_state_dict(plain, {}))
    return found
