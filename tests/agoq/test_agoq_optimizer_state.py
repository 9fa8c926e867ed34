"""Moments in 8 bits: bytes as predicted, small tensors untouched, the training goes on; and the three pieces apart."""

import sys

import pytest
import torch
from torch.nn import Parameter

from dist_lib.agoq import ActivationPlan, ablation, adamw_8bit, moment_bytes, state_bytes
from dist_lib.agoq.memory_model import SYSTEMS
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.tasks import BatchSampler, load_corpus

CONFIG = DecoderConfig(
    vocab_size=256, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=192, max_seq_len=32, tie_embeddings=True
)
STEPS = 8


def test_formula():
    assert moment_bytes([4096]) == 2 * 4096 + 2 * 4 * 16 + 2048
    assert moment_bytes([4095]) == 8 * 4095 == moment_bytes([4095], bits=32)
    assert moment_bytes([4097, 4096]) == 2 * 8193 + 8 * (17 + 16) + 2048
    assert moment_bytes([]) == 0
    large = 10**8
    system = SYSTEMS["o"].parameter_bytes()["moments"]
    assert moment_bytes([large]) / large == pytest.approx(float(system), rel=1e-4)
    with pytest.raises(ValueError, match="give 8 or 32 bits"):
        moment_bytes([5], bits=4)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ImportError, match=r"dist-lib\[agoq\]"):
        adamw_8bit([Parameter(torch.zeros(3))])


@pytest.fixture(scope="module")
def runs():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra agoq)")
    sampler = BatchSampler(load_corpus().train, batch_size=4, seq_len=32, seed=0)
    batches = [sampler.batch(0)] * STEPS  # one batch again and again: its loss falls for sure
    found = ablation(CONFIG, batches, lr=4e-3, plan=ActivationPlan("fp4", 64))
    return {run.pieces: run for run in found}


def test_state_is_what_the_formula_says_and_small_tensors_stay():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra agoq)")
    shapes = [(100, 50), (4095,), (64, 64), (64, 65), (7,)]
    parameters = [Parameter(torch.ones(s)) for s in shapes]
    optimizer = adamw_8bit(parameters, lr=0.1, weight_decay=0.0)
    assert state_bytes(optimizer) == 0
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    plain = torch.optim.AdamW([Parameter(p.detach().clone()) for p in parameters], lr=0.1, weight_decay=0.0)
    twins = plain.param_groups[0]["params"]
    for p, twin in zip(parameters, twins, strict=True):
        twin.grad = p.grad.clone()
    for _ in range(3):
        optimizer.step()
        plain.step()
    assert state_bytes(optimizer) == moment_bytes(p.numel() for p in parameters)
    assert state_bytes(plain) == moment_bytes((p.numel() for p in parameters), bits=32)
    for p, twin in zip(parameters, twins, strict=True):
        apart = float((p - twin).detach().norm() / (twin - 1).detach().norm())
        assert apart < (1e-5 if p.numel() < 4096 else 0.2)
        assert (apart > 1e-4) is (p.numel() >= 4096)  # in 8 bits, and it shows


def test_each_piece_makes_its_own_part_smaller(runs):
    base = runs[""]
    sizes = [p.numel() for p in Decoder(CONFIG).parameters()]
    assert base.moment_bytes == moment_bytes(sizes, bits=32) and base.gradient_bytes == 4 * sum(sizes)
    for pieces, run in runs.items():
        assert run.moment_bytes == moment_bytes(sizes, bits=8 if "O" in pieces else 32)
        assert (run.gradient_bytes < 0.3 * base.gradient_bytes) is ("G" in pieces)
        assert (run.activation_bytes < 0.7 * base.activation_bytes) is ("A" in pieces)
    assert runs["OGA"].activation_bytes == runs["A"].activation_bytes
    assert runs["OGA"].gradient_bytes == runs["G"].gradient_bytes


def test_all_of_them_learn_and_begin_alike(runs):
    base = runs[""]
    for run in runs.values():
        assert run.losses[0] == base.losses[0]  # the forward pass does not change
        assert run.losses[-1] < run.losses[0] - 1
        assert abs(run.losses[-1] - base.losses[-1]) < 0.2
    assert len({run.losses[-1] for run in runs.values()}) == len(runs)  # each piece was really on


def test_what_is_refused():
    with pytest.raises(ValueError, match="no batches"):
        ablation(CONFIG, [])
    with pytest.raises(ValueError, match="letters O, G, A"):
        ablation(CONFIG, [(torch.zeros(1, 2).long(),) * 2], pieces=("X",))
