"""Values of the asynchronous pipeline's chapter in the ledger, computed afresh or from the record of its study."""

import json
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch

from dist_lib.async_pipeline import AsyncConfig, DelayedTrainer, make_schedule, split_decoder, stability_limit, validate
from dist_lib.async_pipeline.formulas import ideal_speedup
from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.comm import launch
from dist_lib.models import Decoder, DecoderConfig
from labs.async_pipeline.study_report import LONG, SHORT, Losses

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "async-study.json"
TINY = DecoderConfig(
    vocab_size=32, d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=32, max_seq_len=8, tie_embeddings=False
)


@cache
def _losses():
    return Losses(json.loads(RECORD.read_text()))


def _gap(optimizer, mode, steps, **where):
    return round(statistics.fmean(_losses().gaps(optimizer, mode, steps, **where)), 3)


def _recovered(steps):
    shares = [100 * _losses().recovered(name, "ef", steps) for name in ("adamw", "muon")]
    return " and ".join(f"{share:.0f}" for share in shares)


@recomputes("delay-one-everywhere")
def one_everywhere():
    reports = [
        validate(make_schedule("2bw", stages=p, micro_batches=m, batches=4, allow_edge=True))
        for p in range(2, 9)
        for m in range(p - 1, 2 * p + 1)
    ]
    assert all(max(r.live_versions) <= 2 for r in reports)
    (found,) = {max(r.delays) for r in reports}
    return found


@recomputes("delay-ideal-speedup")
def ideal():
    return ideal_speedup(stages=4, micro_batches=4)


@recomputes("delay-limit-averaged")
def limit_averaged():
    return " and ".join(f"{stability_limit(0.9, delay=d):.0f}" for d in (0, 1))


@recomputes("delay-limit-feedback")
def limit_feedback():
    return " and ".join(f"{stability_limit(b, error_feedback=1.0):.2f}" for b in (0.9, 0.0))


def _loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adamw(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def _stage(settings, data):
    from dist_lib.async_pipeline import Pipeline

    pipeline = Pipeline(
        split_decoder(Decoder(TINY, seed=0), 2), loss_fn=_loss, make_optimizer=_adamw, config=AsyncConfig(**settings)
    )
    pipeline.run(data)
    return {name: p.detach() for name, p in pipeline.module.named_parameters()}


@recomputes("delay-twin-bits")
def twin_bits():
    generator = torch.Generator().manual_seed(0)
    data = [tuple(torch.randint(32, (2, 8, 8), generator=generator)) for _ in range(6)]
    settings = {"micro_batches": 4, "error_feedback": True, "clip_norm": 0.5}
    twin = DelayedTrainer(
        split_decoder(Decoder(TINY, seed=0), 2), loss_fn=_loss, make_optimizer=_adamw, config=AsyncConfig(**settings)
    )
    twin.run(data)
    wanted = {name: p.detach() for stage in twin.parameters_by_stage() for name, p in stage.items()}
    found = {name: p for stage in launch(_stage, world_size=2, args=(settings, data)) for name, p in stage.items()}
    assert found.keys() == wanted.keys()
    return statistics.fmean(torch.equal(found[name], wanted[name]) for name in wanted)


@recomputes("delay-adamw-gap")
def adamw_gap():
    return _gap("adamw", "delay", LONG)


@recomputes("delay-muon-gap")
def muon_gap():
    return _gap("muon", "delay", LONG)


@recomputes("delay-recovered")
def recovered_long():
    return _recovered(LONG)


@recomputes("delay-recovered-by-seed")
def recovered_by_seed():
    pairs = zip(_losses().gaps("adamw", "ef", LONG), _losses().gaps("adamw", "delay", LONG), strict=True)
    return " and ".join(f"{100 * (1 - left / gap):.0f}" for left, gap in pairs)


def _both(optimizer):
    return f"{_gap(optimizer, 'delay', LONG):.3f} and {_gap(optimizer, 'ef', LONG):.3f}"


@recomputes("delay-nadam")
def nadam():
    return _both("nadam")


@recomputes("delay-adan")
def adan():
    return _both("adan")


@recomputes("delay-soap")
def soap():
    return _both("soap")


@recomputes("delay-normuon")
def normuon():
    return _both("normuon")


@recomputes("delay-lion")
def lion():
    return _both("lion")


@recomputes("delay-recovered-short")
def recovered_short():
    return _recovered(SHORT)


@recomputes("delay-pipedream-16")
def pipedream():
    return _gap("muon", "pipedream16", LONG)


@recomputes("delay-extrapolation")
def extrapolation():
    return f"{_gap('adamw', 'ef', LONG):.3f} and {_gap('adamw', 'extrapolation', LONG):.3f}"


@recomputes("delay-batch")
def batch():
    return f"{_gap('adamw', 'delay', SHORT, batch=8):.2f} and {_losses().gaps('adamw', 'delay', SHORT)[0]:.2f}"


@pytest.mark.parametrize("claim_id", sorted(c for c in recomputers() if c.startswith("delay-")))
def test_the_ledger_holds_what_is_computed(claim_id):
    claim = load_claims()[claim_id]
    value = recomputers()[claim_id]()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"
