"""Newton-Schulz with the interpreted kernel in place of torch's products, and the GPU checks rehearsed on a CPU."""

from functools import partial

import pytest
import torch

from dist_lib.ops import newton_schulz, symmetric

pytest.importorskip("triton", reason="Triton is not installed (it exists on Linux only)")
from dist_lib.kernels import symmetric_matmul as kernel
from labs.gpu import newton_schulz as checks
from labs.gpu_check import GpuReport, Timing


@pytest.fixture
def through_the_kernel(monkeypatch):
    calls = []

    def launch(*args, **more):
        calls.append(args[0].shape)
        more.setdefault("block_m", 64)
        return interpreted(*args, **more)

    interpreted = partial(kernel.launch, interpreted=True)
    monkeypatch.setattr(kernel, "launch", launch)
    monkeypatch.setattr(symmetric, "uses_kernel", lambda x: x.dtype == torch.float16)
    return calls


@pytest.mark.parametrize(("form", "products"), [("direct", 10), ("gram", 2 + 5 + 3 + 6)])
def test_both_forms_use_the_kernel_for_every_symmetric_product(through_the_kernel, form, products):
    x = torch.randn(2, 40, 130, generator=torch.Generator().manual_seed(1))
    exact = newton_schulz(x, form=form, compute_dtype=torch.float64)
    assert not through_the_kernel
    found = newton_schulz(x, form=form, compute_dtype=torch.float16)
    assert len(through_the_kernel) == products
    plain = {"direct": checks.fused_direct, "gram": checks.plain_gram}[form](x, checks.TRIPLES, torch.float16)
    assert checks.distance(found, exact) <= 2 * checks.distance(plain, exact) < 0.05


def test_the_baselines_are_the_same_function():
    x = torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(2))
    exact = newton_schulz(x, compute_dtype=torch.float64)
    for baseline in (checks.fused_direct, checks.plain_gram):
        assert checks.distance(baseline(x, checks.TRIPLES, torch.float32), exact) < 1e-4


def _silent():
    return GpuReport(say=lambda line: None)


def test_the_operator_checks_pass_here_and_fail_for_a_wrong_kernel(monkeypatch):
    report = _silent()
    checks.check_operators(report, "cpu", [(1, 1, 1), (2, 70, 130)])
    assert [e.ok for e in report.entries] == [True] * 6, [e for e in report.entries if not e.ok]
    right = kernel.launch

    def first_column_wrong(*args, **more):
        out = right(*args, **more)
        out[:, :-1, 0] *= 1.5
        return out

    monkeypatch.setattr(kernel, "launch", first_column_wrong)
    report = _silent()
    checks.check_operators(report, "cpu", [(2, 70, 130)])
    assert not any(e.ok for e in report.entries)


def test_the_iteration_checks_pass_here_and_fail_for_a_wrong_iteration(monkeypatch):
    def run():
        report = _silent()
        checks.check_newton_schulz(report, "cpu", [(2, 24, 70)])
        checks.check_edges(report, "cpu", (4, 16, 40))
        return report

    report = run()
    assert len(report.entries) == 8 and not report.failed, [e for e in report.entries if not e.ok]
    right = checks.newton_schulz

    def mixes_the_batch(x, **more):
        dtype = more.pop("compute_dtype", None)
        return right(x + 0.1 * x.mean(0, keepdim=True) if dtype != torch.float64 else x, **more)

    monkeypatch.setattr(checks, "newton_schulz", mixes_the_batch)
    wrong = [e.name for e in run().entries if not e.ok]
    assert any("direct" in name for name in wrong) and any("NaN" in name for name in wrong)
    assert any("alone" in name for name in wrong)


def test_the_times_are_reported_in_rows(monkeypatch, through_the_kernel):
    def time(self, fn, **more):
        fn()
        return Timing(1e-3, 0.9e-3, 1.1e-3, 3)

    monkeypatch.setattr(GpuReport, "time", time)
    monkeypatch.setattr(checks, "_draw", lambda *shape, device, dtype=torch.float32: torch.randn(*shape).to(dtype))
    monkeypatch.setattr(checks, "ROWS", ((32, 96, 2, 1.5),))
    monkeypatch.setattr(checks, "GATE_SIZES", (32, 64))
    report = _silent()
    checks.time_iterations(report)
    checks.time_batching(report, 16, 2)
    checks.time_gate(report)
    checks.time_tiles(report, 64)
    text = "\n".join(f"{e.name}: {e.text}" for e in report.entries)
    assert "gram" in text and "good is 1.5" in text and "gate is 2048" in text and "tile 64x128" in text
    assert text.count("as fast as the baseline") == 4
