"""What must not go wrong quietly: NaN, infinities, zeros, extremes, wrong arguments, compilation."""

import pytest
import torch

from dist_lib.ops import CODECS, Quantized, accumulate_, dequantize, quantize, quantized_zeros

ALL = list(CODECS)
SYMMETRIC = [name for name in ALL if name != "int4_minmax"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_one_bad_number_poisons_its_block_and_no_other(name, bad):
    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    clean = quantize(x, name, 32).dequantize()
    x[1, 40] = bad
    for scale_dtype in (torch.float32, torch.float16):
        q = quantize(x, name, 32, scale_dtype)
        out = q.dequantize()
        assert out[1, 32:64].isnan().all() and q.scales[1, 1].isnan().all()
        out[1, 32:64] = 0
        assert out.isfinite().all()
    again = quantize(x, name, 32).dequantize()
    assert torch.equal(again[0], clean[0]) and torch.equal(again[1, :32], clean[1, :32])
    assert quantize(x, name, 32, rounding="stochastic", generator=1).dequantize()[1, 32:64].isnan().all()


@pytest.mark.parametrize("name", [n for n in ALL if CODECS[n].bits == 8])
def test_a_sum_stays_poisoned(name):
    q = quantized_zeros((64,), name, 32)
    x = torch.ones(64)
    x[3] = float("nan")
    accumulate_(accumulate_(q, x), torch.ones(64))
    out = q.dequantize()
    assert out[:32].isnan().all() and (out[32:] == 2).all()


@pytest.mark.parametrize("name", ALL)
def test_zeros_come_back_as_zeros(name):
    x = torch.randn(3, 96)
    x[0] = 0
    x[1, ::3] = 0.0
    x[2, 64:] = -0.0
    q = quantize(x, name, 32)
    out = q.dequantize()
    assert (out[0] == 0).all() and (out[2, 64:] == 0).all() and (q.scales[0] == 0).all()
    if name != "int4_minmax":
        assert (out[1, ::3] == 0).all()
        if CODECS[name].kind in ("signed", "float8"):
            assert torch.equal(torch.signbit(out[x == 0]), torch.signbit(x[x == 0]))
        noisy = quantize(x, name, 32, rounding="stochastic", generator=0).dequantize()
        assert (noisy[x == 0] == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_extremes_of_float32(name):
    g = torch.Generator().manual_seed(1)
    unit = torch.rand(1, 64, generator=g)
    unit[0, 0] = 1.0
    gap = CODECS[name].half_gap
    for exponent in (127, 126, 100, 64, -64, -100, -108):
        x = unit * 2.0**exponent * 0.99
        error = (quantize(x, name, 64).dequantize() - x).abs().max()
        assert error <= gap * 2.0**exponent * (1 + 1e-5), exponent
    for exponent in (-109, -111, -113, -126, -130, -140, -149):
        x = unit * 2.0**exponent
        out = quantize(x, name, 64).dequantize()
        assert out.isfinite().all() and (out.abs() <= 2.0**exponent * 1.5).all() and (out >= 0).all()


def test_a_scale_beyond_float16_raises_and_small_blocks_keep_an_absolute_bound():
    with pytest.raises(ValueError, match="beyond float16"):
        quantize(torch.full((40,), 1e5), scale_dtype=torch.float16)
    x = torch.linspace(-3e-6, 3e-6, 128)
    for name in ALL:
        out = quantize(x, name, scale_dtype=torch.float16).dequantize()
        assert (out - x).abs().max() <= CODECS[name].half_gap * 2**-14 * (2 if name == "int4_minmax" else 1) * 8


def test_numbers_beyond_float16_are_no_problem_with_float32_scales():
    x = torch.linspace(-3e5, 3e5, 128)
    assert (quantize(x, "int8").dequantize() - x).abs().max() <= 3e5 / 254 * 1.0001


def test_float64_beyond_float32_is_poison():
    assert quantize(torch.full((4,), 1e300, dtype=torch.float64)).dequantize().isnan().all()


def test_an_odd_length_does_not_read_or_write_beyond_its_bytes():
    x = torch.randn(2, 33)
    q = quantize(x, "int5", 32)
    room = torch.full((2, q.codes.shape[1] + 7), 255, dtype=torch.uint8)
    room[:, : q.codes.shape[1]] = q.codes
    view = Quantized(room[:, : q.codes.shape[1]].contiguous(), q.scales, q.shape, q.dtype, "int5", 32)
    assert torch.equal(view.dequantize(), q.dequantize())


def test_wrong_arguments_say_what_is_allowed():
    x = torch.randn(4, 64)
    with pytest.raises(ValueError, match="fp4, e2m1, nf4"):
        quantize(x, "fp5")
    with pytest.raises(ValueError, match=r"100; choose one of \(32, 64, 128, 256\)"):
        quantize(x, block_size=100)
    with pytest.raises(TypeError, match=r"float32 or torch\.float16"):
        quantize(x, scale_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="'nearest' or 'stochastic'"):
        quantize(x, rounding="up")
    with pytest.raises(ValueError, match="needs a generator"):
        quantize(x, rounding="stochastic")
    with pytest.raises(ValueError, match="outside 0"):
        quantize(x, rounding="stochastic", generator=-1)
    with pytest.raises(TypeError, match="int64"):
        quantize(torch.arange(4))
    with pytest.raises(TypeError, match="int32"):
        quantize(x).dequantize(torch.int32)
    with pytest.raises(ValueError, match="int8, dynamic8, e4m3, e5m2"):
        accumulate_(quantize(x), x)
    with pytest.raises(ValueError, match=r"\(4, 63\), the sum has \(4, 64\)"):
        accumulate_(quantize(x, "int8"), x[:, 1:])
    q = quantize(x)
    with pytest.raises(ValueError, match="do not belong"):
        dequantize(Quantized(q.codes[:, 1:], q.scales, q.shape, q.dtype, "fp4", 128))


def test_codes_are_outside_of_autograd():
    x = torch.randn(4, 64, requires_grad=True)
    q = quantize(x)
    assert not q.scales.requires_grad and not q.dequantize().requires_grad


def test_the_registered_operations_pass_torchs_own_checks():
    x = torch.randn(3, 70)
    samples = [("int5", 32, True, -1), ("int4_minmax", 64, False, 3), ("fp4", 128, False, -1)]
    tests = ("test_schema", "test_faketensor")
    for name, size, half, seed in samples:
        torch.library.opcheck(torch.ops.dist_lib.quantize_blocks, (x, name, size, half, seed), test_utils=tests)
        codes, scales = torch.ops.dist_lib.quantize_blocks(x, name, size, half, seed)
        args = (codes, scales, 70, name, size, torch.bfloat16)
        torch.library.opcheck(torch.ops.dist_lib.dequantize_blocks, args, test_utils=tests)
    q = quantize(x, "int8")
    torch.library.opcheck(
        torch.ops.dist_lib.accumulate_blocks, (q.codes, q.scales, x, "int8", 128, -1), test_utils=tests
    )


def test_compiled_without_a_graph_break():
    x = torch.randn(3, 70)

    def trip(x):
        return quantize(x, "nf4", 32).dequantize()

    assert torch.equal(torch.compile(trip, backend="eager", fullgraph=True)(x), trip(x))
