"""Values of PULSELoCo in the ledger, computed afresh: synthetic rounds, the cast error, and bits on two workers."""

from functools import cache
from statistics import fmean

import pytest
import torch

import dist_lib.pulse.loco as loco
from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.comm import launch
from dist_lib.pulse import DenseDiLoCo, OuterConfig, PulseLoCo
from dist_lib.pulse.loco_config import dense_wire_bytes, sparse_wire_bytes
from dist_lib.pulse.loco_loop import nesterov_step
from dist_lib.pulse.loco_streams import synthetic_rounds

CELLS, WORKERS = 50_000, 4


@cache
def _means(lr, inner_steps):
    """Gate density, union density and bytes of a parameter: means over the first 20 rounds."""
    config = OuterConfig(inner_steps=inner_steps)
    rounds = list(synthetic_rounds(CELLS, lr=lr, rounds=20, config=config, workers=WORKERS, coded=True))
    return tuple(fmean(getattr(r, k) for r in rounds) for k in ("gate_density", "union_density", "bytes_per_parameter"))


def _density(name, lr, inner_steps):
    @recomputes(name)
    def density():
        return 100 * _means(lr, inner_steps)[0]

    return density


for _h in (1, 4, 8, 16):
    _density(f"pulse-loco-density-h{_h}", 3e-6, _h)
_density("pulse-loco-density-slow", 1e-6, 8)


@recomputes("pulse-loco-union")
def union():
    gate, any_worker, _ = _means(3e-6, 8)
    return any_worker / gate


@recomputes("pulse-loco-coordinate")
def bytes_of_a_coordinate():
    gate, _, size = _means(3e-6, 8)
    return size / gate


def _less(lr, inner_steps=8):
    return 4 / _means(lr, inner_steps)[2]


@recomputes("pulse-loco-traffic")
def traffic():
    return f"{_less(3e-6):.0f} and {_less(1e-6):.0f}"


@recomputes("pulse-loco-traffic-slower")
def traffic_slower():
    return _less(5e-7)


@recomputes("pulse-loco-traffic-ddp")
def traffic_against_data_parallelism():
    return f"{8 * _less(3e-6):.0f} and {8 * _less(1e-6):.0f}"


@recomputes("pulse-loco-links")
def links():
    payload = round(CELLS * _means(1e-6, 8)[2])
    return dense_wire_bytes(CELLS, WORKERS) / sparse_wire_bytes(payload, WORKERS)


@recomputes("pulse-loco-cast-error")
def cast_error():
    """Nothing is learnt; inner weights begin at the cast of the agreed ones instead of at these themselves."""
    theta = torch.randn(100_000, generator=torch.Generator().manual_seed(5)) * 0.02
    error, momentum = torch.zeros_like(theta), torch.zeros_like(theta)
    for _ in range(30):
        s = (theta - theta.bfloat16().float()) + error
        mask = loco.gate(theta, s)
        sent, error = loco.feedback(s, mask)
        nesterov_step(theta, momentum, sent, lr=0.7, mu=0.9)
    return 100 * float(mask.double().mean())


def _open_gate_and_dense():
    thetas = []
    for kind in (PulseLoCo, DenseDiLoCo):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop = kind(model, inner, OuterConfig(inner_steps=3, gate_dtype=None))
        data = torch.Generator().manual_seed(1 + loop.channel.rank)
        while loop.rounds < 4:
            inner.zero_grad()
            x = torch.randn(8, 32, generator=data)
            (model(x) - x).square().mean().backward()
            loop.step()
        thetas.append(loop.theta.view(torch.int32))
    return thetas


@recomputes("pulse-loco-open-gate")
def open_gate():
    found = [theta for thetas in launch(_open_gate_and_dense, world_size=2, timeout_s=90) for theta in thetas]
    return sum(int((theta != found[0]).sum()) for theta in found[1:])


@pytest.mark.parametrize("claim_id", sorted(c for c in recomputers() if c.startswith("pulse-loco-")))
def test_the_ledger_is_right(claim_id):
    claim, value = load_claims()[claim_id], recomputers()[claim_id]()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"
