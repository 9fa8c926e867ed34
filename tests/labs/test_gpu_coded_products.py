"""The GPU checks of fused products as far as a CPU can run them: they pass on the reference and see planted faults."""

import pytest

from labs.gpu import coded_products as checks
from labs.gpu_check import CHECK_MODULES, GpuReport


def _report():
    return GpuReport(say=lambda _: None)


def test_checks_pass_where_both_sides_are_the_reference():
    report = _report()
    checks.check_products(report, "cpu", fused=False, names=("fp4", "int5"))
    assert not report.failed and len(report.entries) == 8
    assert checks.__name__ in CHECK_MODULES


def _wrong_codes(gate, up, name, **_):
    product, a, b = checks_swiglu(gate, up, name)
    a.codes[0, 0] ^= 1
    return product, a, b


def _wrong_product(gate, up, name, **_):
    product, a, b = checks_swiglu(gate, up, name)
    return product * 1.01, a, b


checks_swiglu = checks.swiglu_quantize


@pytest.mark.parametrize("wrong", [_wrong_codes, _wrong_product])
def test_a_wrong_code_or_product_fails(monkeypatch, wrong):
    def fused(gate, up, name, fused=None):
        return checks_swiglu(gate, up, name) if fused is None else wrong(gate, up, name)

    monkeypatch.setattr(checks, "swiglu_quantize", fused)
    report = _report()
    checks.check_products(report, "cpu", fused=False, names=("fp4",))
    assert report.failed


def test_a_gradient_of_other_numbers_fails(monkeypatch):
    monkeypatch.setattr(checks, "weight_gradient", lambda grad, q, **_: (grad.mT @ q.dequantize()) * 1.01)
    report = _report()
    checks.check_products(report, "cpu", fused=False, names=("fp4",))
    assert report.failed


def test_rows_are_timed(monkeypatch):
    report = _report()
    rows = []
    monkeypatch.setattr(report, "time", lambda fn, **_: fn() is None)
    monkeypatch.setattr(report, "row", lambda name, *_, **sizes: rows.append((name, sizes)))
    checks.time_products(report, "cpu", ((8, 32, 128), (8, 128, 64)), fused=False)
    assert [name.split(",")[0] for name, _ in rows] == [
        "SwiGLU and quantise 8x64",
        "weight gradient 32x128 from 8 tokens in fp4",
        "weight gradient 128x64 from 8 tokens in fp4",
    ]
    assert rows[1][1]["flops"] == 2 * 8 * 32 * 128
    assert rows[0][1]["nbytes"] == 3 * 8 * 64 * 2 + 2 * (8 * 32 + 8 * 4)
