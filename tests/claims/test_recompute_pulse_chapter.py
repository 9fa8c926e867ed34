"""Values of the chapter on sparse weight sync in the ledger, computed afresh."""

from functools import cache

import pytest
import torch

from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.optim import Muon
from dist_lib.pulse.drill import FAULTS, PARTS, run_drill
from dist_lib.pulse.figures import simulated_curve
from dist_lib.pulse.published import CELLS_7B, PUBLISHED, PUBLISHED_KS
from dist_lib.pulse.sparsity_measures import adam_bound, adam_bound_sharp, ulp
from dist_lib.pulse.streams import adamw_stream
from dist_lib.pulse.timing import PAPER_COMPUTE_S, PAPER_FULL_BYTES, PAPER_PATCH_BYTES, bandwidth_needed

SEVEN, EIGHT = PUBLISHED[0], PUBLISHED_KS.index(8)


@recomputes("pulse-curve-stored")
def stored():
    return simulated_curve("bf16", SEVEN.lr)[EIGHT]


@recomputes("pulse-curve-master")
def master():
    return simulated_curve("fp32", SEVEN.lr)[EIGHT]


@recomputes("pulse-full-size")
def full_size():
    return 2 * CELLS_7B / 1e9


@recomputes("pulse-bandwidth-full")
def bandwidth_full():
    return bandwidth_needed(PAPER_FULL_BYTES, PAPER_COMPUTE_S, 0.9) / 1e9


@recomputes("pulse-bandwidth-patch")
def bandwidth_patch():
    return bandwidth_needed(PAPER_PATCH_BYTES, PAPER_COMPUTE_S, 0.9) / 1e9


@recomputes("pulse-adam-bound")
def bound():
    return adam_bound(0.9, 0.999)


@recomputes("pulse-adam-bound-least")
def least_bound():
    return adam_bound_sharp(0.9, 0.999)


@cache
def _recall(storage):
    for step in adamw_stream(200_000, lr=3e-6, steps=31, storage=storage):
        changed = step.old.view(torch.int16) != step.new.view(torch.int16)
        guessed = step.update.abs() > ulp(step.weight) / 2
    return 100 * float((guessed & changed).sum() / changed.sum())


@recomputes("pulse-mask-recall")
def recall():
    assert _recall("bf16") > 99.5
    return _recall("fp32")


@cache
def _density(kind, signal, lr=3e-6, n=320):
    """Density of step 31 of a matrix with an FP32 master, in per cent."""
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(n, n, generator=generator) * 0.02)
    constant = torch.randn(n, n, generator=generator) * signal
    options = {"lr": lr, "weight_decay": 0.0}
    optimizer = Muon([w], **options) if kind == "muon" else torch.optim.AdamW([w], betas=(0.9, 0.999), **options)
    for _ in range(31):
        before = w.detach().bfloat16()
        w.grad = torch.randn(n, n, generator=generator) + constant
        optimizer.step()
    return 100 * float((before != w.detach().bfloat16()).double().mean())


@recomputes("pulse-muon-density")
def muon():
    assert abs(_density("muon", 2.0) - _density("muon", 0.0)) < 0.1
    return f"{_density('muon', 0.0):.1f} and {_density('muon', 2.0):.1f}"


@recomputes("pulse-muon-density-adamw")
def adamw():
    return f"{_density('adamw', 0.0):.1f} and {_density('adamw', 2.0):.1f}"


@recomputes("pulse-drill-third-states")
def third_states():
    return sum(not run_drill(fault, part).identical for fault in FAULTS for part in PARTS)


CHAPTER = {
    "pulse-curve-stored",
    "pulse-curve-master",
    "pulse-full-size",
    "pulse-bandwidth-full",
    "pulse-bandwidth-patch",
    "pulse-adam-bound",
    "pulse-adam-bound-least",
    "pulse-mask-recall",
    "pulse-muon-density",
    "pulse-muon-density-adamw",
    "pulse-drill-third-states",
}


@pytest.mark.parametrize("name", sorted(CHAPTER))
def test_value_is_recomputed(name):
    claim = load_claims()[name]
    assert claim.agrees(recomputers()[name]()), f"{name}: {recomputers()[name]()}, the ledger has {claim.our_value}"
