"""The GPU checks of training with codes, on a CPU: peaks of a small stack, messages over gloo, planted faults."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from dist_lib.agoq import functions
from dist_lib.agoq.wire import Hops
from labs.gpu import quantized_training as checks
from labs.gpu_check import CHECK_MODULES, GpuReport

SMALL = dataclasses.replace(checks.STACK, d_model=256, n_heads=4, n_kv_heads=1, d_ff=896, n_layers=3, max_seq_len=512)


@pytest.fixture
def report():
    return GpuReport(say=lambda _: None)


def failures(report):
    return [e.name.split(", ")[-1] for e in report.entries if e.ok is False]


def test_peaks_are_those_of_the_formula(report):
    checks.check_peak(report, "cpu", SMALL, 512)
    assert failures(report) == [] and len(report.entries) == 3
    for entry in report.entries[:2]:  # the count of live tensors gives the very number
        assert entry.values["peak"] == entry.values["formula"], entry.name


@pytest.mark.parametrize("d_ff", [512, 1280])
def test_the_formula_follows_the_width(d_ff):
    config = dataclasses.replace(SMALL, d_ff=d_ff, n_kv_heads=4)
    for plan in (None, checks.ActivationPlan("nf4", 64)):
        assert checks._peak_of_stack("cpu", config, 512, plan) == checks.peak_formula(config, 512, plan)


def test_an_original_that_stays_beside_its_codes_is_found(report, monkeypatch):
    forward = functions._SwiGLULinear.forward

    def keeping(ctx, gate, up, weight, form):
        ctx.kept = gate
        return forward(ctx, gate, up, weight, form)

    monkeypatch.setattr(functions._SwiGLULinear, "forward", staticmethod(keeping))
    checks.check_peak(report, "cpu", SMALL, 512)
    assert len(failures(report)) == 2  # the stack with codes, and what they save


def test_messages_over_one_rank_have_the_bits_of_the_reference(report):
    checks.check_messages(report, "cpu", 1000)
    assert failures(report) == [] and len(report.entries) == 6


def test_a_message_that_is_changed_or_too_long_is_found(report, monkeypatch):
    gather = Hops.gather

    def flipped(self, own):
        rows = gather(self, own).clone()
        rows[0, -1 - 1000 % 4] ^= 1
        gather(self, own)
        return rows

    monkeypatch.setattr(Hops, "gather", flipped)
    checks.check_messages(report, "cpu", 1000)
    assert len(failures(report)) == 6


def test_live_bytes_fall_when_tensors_die():
    x = torch.ones(100)
    with checks.LiveBytes([x]) as live:
        y = x + 1
        z = y[:50] * 2
        assert live.now == 600
        del y
        assert live.now == 200
        x.add_(1)
    assert live.peak == 600 and z.sum() == 200


def test_it_is_registered_and_needs_little():
    assert "labs.gpu.quantized_training" in CHECK_MODULES
    heavy = "('scipy', 'numba', 'rich', 'typer', 'plotly', 'zstandard', 'bitsandbytes')"
    code = f"import sys, labs.gpu.quantized_training; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
