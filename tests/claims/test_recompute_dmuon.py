"""Values of the DMuon chapter in the ledger, computed afresh."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dist_lib.claims import load_claims, recomputes
from dist_lib.comm import distributed, launch
from dist_lib.dmuon.cost_model import optimizer_times, reproduction_table, saturation_ranks
from dist_lib.dmuon.published import TABLE_1
from dist_lib.dmuon.workloads import workload
from labs.dmuon.config import Config
from labs.dmuon.run import run
from labs.dmuon.shares import kernel_shares
from labs.framework import RunContext

AT_256 = {"wallx": 4, "pi0": 4, "qwen2.5-7b": 2}  # bytes of a gathered gradient


def _modelled(model, system, quantity):
    rows = [r for r in reproduction_table() if r.published.world == 256 and r.published.model == model]
    return next(r.modelled_ms for r in rows if (r.published.system, r.published.quantity) == (system, quantity))


@recomputes("dmuon-step-speedup")
def step_speedup():
    found = [_modelled(m, "gather", "step") / _modelled(m, "dmuon", "step") for m in AT_256]
    return f"{min(found):.1f} to {max(found):.1f}"


@recomputes("dmuon-optimizer-speedup")
def optimizer_speedup():
    found = [optimizer_times(m, w, gradient_bytes=g).speedup for m, g in AT_256.items() for w in (8, 256)]
    return f"{min(found):.0f} to {max(found):.0f}"


@recomputes("dmuon-over-adamw")
def over_adamw():
    adamw = {row.label: row.adamw_ms for row in TABLE_1}
    names = {"wallx": "Wall-OSS", "pi0": "Pi0", "qwen2.5-7b": "Qwen2.5-7B"}
    return 100 * sum(_modelled(m, "dmuon", "step") / adamw[n] - 1 for m, n in names.items()) / len(names)


@recomputes("dmuon-gather-wallx-256")
def gather_wallx():
    return _modelled("wallx", "gather", "optimizer")


@recomputes("dmuon-owners-wallx-256")
def owners_wallx():
    return _modelled("wallx", "dmuon", "optimizer")


@recomputes("dmuon-gather-pi0-256")
def gather_pi0():
    return _modelled("pi0", "gather", "optimizer")


@recomputes("dmuon-owners-pi0-256")
def owners_pi0():
    return _modelled("pi0", "dmuon", "optimizer")


@recomputes("dmuon-gather-qwen-256")
def gather_qwen():
    return _modelled("qwen2.5-7b", "gather", "optimizer")


@recomputes("dmuon-owners-qwen-256")
def owners_qwen():
    return _modelled("qwen2.5-7b", "dmuon", "optimizer")


@recomputes("dmuon-kernel-share")
def kernel_share():
    first, last = kernel_shares("wallx", 128, gradient_bytes=4)
    return f"{100 * last:.1f} to {100 * first:.0f}"


@recomputes("dmuon-overhead-pi0")
def overhead_pi0():
    row = next(r for r in TABLE_1 if r.label == "Pi0")
    return 100 * (row.dmuon_ms / row.adamw_ms - 1)


@recomputes("dmuon-optimizer-ratio-wall-wm")
def ratio_wall_wm():
    row = next(r for r in TABLE_1 if r.label == "Wall-WM")
    return row.gather_optimizer_ms / row.dmuon_optimizer_ms


@recomputes("dmuon-saturation-qwen")
def saturation_qwen():
    return saturation_ranks(workload("qwen2.5-7b"))


@recomputes("dmuon-saturation-wallx")
def saturation_wallx():
    return saturation_ranks(workload("wallx"))


def _trained(folder):
    config = Config(
        model="tiny-0.3m",
        steps=5,
        batch_size=8,
        seq_len=32,
        lr=0.01,
        adamw_lr=0.01,
        compared=("gather",),
        save_every=0,
    )
    with distributed(device="cpu") as ctx:
        return run(config, RunContext(ctx, 0, Path(folder)))


@lru_cache(maxsize=1)
def _two_ranks():
    with TemporaryDirectory() as folder:
        return launch(_trained, world_size=2, args=(folder,))[0]


@recomputes("dmuon-twin-tensors")
def twin_tensors():
    equal, of = _two_ranks()["dmuon_tensors_equal_to_twin"].split(" of ")
    return float(int(of) - int(equal))


@recomputes("dmuon-orthogonalised")
def orthogonalised():
    return float(_two_ranks()["dmuon_times_orthogonalised_a_step"])


@recomputes("dmuon-ranks-with-formula-bytes")
def formula_bytes():
    found = _two_ranks()
    keys = [f"{name}_ranks_with_bytes_of_the_formula" for name in ("dmuon", "gather")]
    return float(sum(int(found[k].split(" of ")[0]) for k in keys))


COMPUTED = {
    "dmuon-step-speedup": step_speedup,
    "dmuon-optimizer-speedup": optimizer_speedup,
    "dmuon-over-adamw": over_adamw,
    "dmuon-gather-wallx-256": gather_wallx,
    "dmuon-owners-wallx-256": owners_wallx,
    "dmuon-gather-pi0-256": gather_pi0,
    "dmuon-owners-pi0-256": owners_pi0,
    "dmuon-gather-qwen-256": gather_qwen,
    "dmuon-owners-qwen-256": owners_qwen,
    "dmuon-kernel-share": kernel_share,
    "dmuon-overhead-pi0": overhead_pi0,
    "dmuon-optimizer-ratio-wall-wm": ratio_wall_wm,
    "dmuon-saturation-qwen": saturation_qwen,
    "dmuon-saturation-wallx": saturation_wallx,
    "dmuon-twin-tensors": twin_tensors,
    "dmuon-orthogonalised": orthogonalised,
    "dmuon-ranks-with-formula-bytes": formula_bytes,
}


@pytest.mark.parametrize("claim_id", list(COMPUTED))
def test_the_ledger_holds_what_is_computed(claim_id):
    claim, value = load_claims()[claim_id], COMPUTED[claim_id]()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"
