"""The GPU checks of block quantisation as far as a CPU can run them: their own logic, and the formula of the bytes."""

import dataclasses

import pytest
import torch

from dist_lib.agoq import ActivationPlan, quantize_activations
from dist_lib.models import Decoder, SavedTensorCounter
from dist_lib.models.decoder import rotary_table
from dist_lib.ops import quantize
from labs.gpu import quantization as checks
from labs.gpu_check import GpuReport


def _report():
    return GpuReport(say=lambda _: None)


def test_the_checks_pass_where_both_sides_are_the_reference():
    report = _report()
    checks.check_codecs(report, "cpu", checks.CASES[1:2])
    checks.check_accumulation(report, "cpu")
    checks.check_fused(report, "cpu", 4, (96,))
    assert not report.failed and len(report.entries) == 11 + 4 + 2


def test_a_wrong_code_a_wrong_scale_or_a_lost_nan_is_seen():
    x = checks._numbers((3, 64), torch.float32)
    q = quantize(x, block_size=32)
    assert checks._alike(q, quantize(x, block_size=32))
    codes, scales, lost = q.codes.clone(), q.scales.clone(), q.scales.clone()
    codes[0, 0] ^= 1
    scales[0, 0] *= 1.0000002
    lost[1, 0] = 1.0
    for changed in ({"codes": codes}, {"scales": scales}, {"scales": lost}):
        assert not checks._alike(dataclasses.replace(q, **changed), q)


def test_the_formula_of_the_bytes_is_what_autograd_keeps():
    config = dataclasses.replace(
        checks.EIGHT_B, d_model=256, n_heads=2, n_kv_heads=2, d_ff=896, n_layers=1, max_seq_len=64
    )
    plan = ActivationPlan("fp4", 128)
    model = quantize_activations(Decoder(config).bfloat16(), plan)
    cos, sin = (t.bfloat16() for t in rotary_table(config, 64, torch.device("cpu")))
    x = torch.randn(1, 64, 256).bfloat16().requires_grad_()
    with SavedTensorCounter(model) as counter:
        model.layers[0](x, cos, sin)
    angles = cos.nbytes + sin.nbytes
    assert counter.bytes - angles == pytest.approx(checks.held_formula(config, 1, 64, plan), rel=0.001)


def test_a_random_model_has_gains_near_one_and_matrices_near_zero():
    config = dataclasses.replace(checks.EIGHT_B, d_model=64, n_heads=2, n_kv_heads=2, d_ff=128, n_layers=1)
    model = checks.random_model(config, "cpu")
    for name, parameter in model.named_parameters():
        mean, spread = (1.0, 0.02) if parameter.ndim == 1 else (0.0, 0.02)
        assert parameter.device.type == "cpu" and parameter.dtype == torch.bfloat16, name
        assert float(parameter.detach().float().mean()) == pytest.approx(mean, abs=0.01), name
        assert float(parameter.detach().float().std()) == pytest.approx(spread, rel=0.4), name
