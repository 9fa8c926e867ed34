"""Codes, packing, bounds, shapes and bytes of block quantisation."""

import math

import pytest
import torch

from dist_lib.ops import CODECS, accumulate_, dequantize, quantize, quantized_nbytes, quantized_zeros
from dist_lib.ops.noise import uniform
from dist_lib.ops.packing import pack, packed_bytes, unpack

ALL = list(CODECS)
SYMMETRIC = [name for name in ALL if name != "int4_minmax"]
EIGHT = [name for name in ALL if CODECS[name].bits == 8]


def _numbers(*shape, seed=0, spread=3.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(*shape[:-1], 1, generator=g))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_packing_is_exact_and_as_small_as_it_says(bits):
    for count in (1, 2, 3, 7, 8, 9, 31, 32, 127, 128):
        codes = torch.randint(0, 2**bits, (2, count), dtype=torch.uint8)
        packed = pack(codes, bits)
        assert packed.shape == (2, packed_bytes(count, bits))
        assert torch.equal(unpack(packed, count, bits), codes)
    assert packed_bytes(128, bits) == 128 * bits // 8


def test_tables_are_those_of_the_formats():
    assert CODECS["e2m1"].levels[8:] == pytest.approx([1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1])
    assert CODECS["fp4"].levels[8:] == pytest.approx([1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1])
    assert CODECS["int6"].levels == pytest.approx([k / 31 for k in range(-31, 32)])
    assert (len(CODECS["e4m3"].levels), len(CODECS["e5m2"].levels), len(CODECS["dynamic8"].levels)) == (253, 247, 256)
    gaps = {"fp4": 1 / 6, "e2m1": 1 / 6, "nf4": 0.1519, "int4": 1 / 14, "int5": 1 / 30, "int6": 1 / 62, "int8": 1 / 254}
    gaps |= {"dynamic8": 0.00703, "e4m3": 1 / 28, "e5m2": 1 / 14}
    for name, gap in gaps.items():
        assert CODECS[name].half_gap == pytest.approx(gap, rel=1e-3)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_every_level_comes_back_exactly_and_everything_else_goes_to_the_nearest(name):
    codec = CODECS[name]
    levels = torch.tensor(codec.levels, dtype=torch.float64)
    for at in range(0, len(levels), 31):
        part = torch.cat((levels[at : at + 31], levels.new_tensor([1.0]))).float()
        torch.testing.assert_close(quantize(part, name, 32).dequantize(), part, rtol=3e-7, atol=0)
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    x[:, 0] = 1.0
    nearest = (x.double()[..., None] - levels).abs().min(-1).values
    assert ((dequantize(quantize(x, name, 32)).double() - x).abs() - nearest).abs().max() < 2e-7


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256])
@pytest.mark.parametrize("name", ALL)
def test_error_is_within_the_bound_in_every_block(name, block_size, scale_dtype):
    half = scale_dtype == torch.float16
    x = _numbers(40, 2 * block_size, spread=1.5 if half else 12.0)
    error = (quantize(x, name, block_size, scale_dtype).dequantize() - x).abs().unflatten(-1, (2, block_size))
    blocks = x.unflatten(-1, (2, block_size))
    reach = blocks.abs().amax(-1, keepdim=True)
    bound = CODECS[name].half_gap * reach
    if name == "int4_minmax":
        span = blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)
        bound = CODECS[name].half_gap * span + (reach * 2**-10 if half else 0)
    rounding = 2**-23 * reach  # of the decoded number itself
    if name == "dynamic8" and half:  # -1 is not in its grid, so a scale rounded down shows in full
        rounding = 2**-11 * reach
    assert (error <= bound * (1 + (2**-10 if half else 1e-6)) + rounding).all()
    assert (error.amax(-1, keepdim=True) > 0.3 * bound).float().mean() > 0.5  # the bound is not an empty one


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "shape",
    [(), (0,), (1,), (127,), (128,), (129,), (3, 0), (0, 5), (2, 3, 65), (5, 1), (1, 300), (2, 2, 2, 33)],
    ids=str,
)
def test_any_shape_comes_back_and_takes_the_bytes_of_the_formula(shape, name):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for flat in (False, True):
        for scale_dtype in (torch.float32, torch.float16):
            q = quantize(x, name, 64, scale_dtype, flat=flat)
            assert q.nbytes == quantized_nbytes(shape, name, 64, scale_dtype, flat=flat)
            assert q.codes.dtype == torch.uint8 and q.codes.is_contiguous() and q.scales.dtype == scale_dtype
            out = q.dequantize()
            assert out.shape == x.shape and out.dtype == x.dtype
            if x.numel():
                assert (out - x).abs().max() <= 0.2 * x.abs().max()


def test_bytes_of_one_row():
    """Five bits: two whole blocks of 64 codes (32 + 8 bytes) and 37 codes (19 + 5 bytes), three scales of 2 bytes."""
    assert quantized_nbytes((165,), "int5", 64, torch.float16) == 2 * 40 + 24 + 3 * 2
    assert quantized_nbytes((4, 165), "int4_minmax", 128) == 4 * (83 + 2 * 2 * 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes_take_the_codes_of_their_float32_values(dtype):
    x = _numbers(3, 130, spread=0.5).to(dtype)
    for name in ALL:
        q, wide = quantize(x, name), quantize(x.float(), name)
        assert torch.equal(q.codes, wide.codes) and torch.equal(q.scales, wide.scales)
        assert torch.equal(q.dequantize(), wide.dequantize().to(dtype))
        assert q.dequantize(torch.float32).dtype == torch.float32


def test_strided_and_transposed_tensors():
    base = _numbers(40, 70, spread=0.5)
    for view in (base.t(), base[::2, 3:60], base[:, ::3], base[:, 0]):
        for flat in (False, True):
            q, same = quantize(view, "int5", 32, flat=flat), quantize(view.clone().contiguous(), "int5", 32, flat=flat)
            assert torch.equal(q.codes, same.codes) and torch.equal(q.scales, same.scales)


def test_a_row_does_not_depend_on_its_neighbours_and_blocks_do_not_span_rows():
    x = _numbers(6, 100, spread=6.0)
    for name in ALL:
        whole = quantize(x, name, 64)
        for i in range(6):
            alone = quantize(x[i], name, 64)
            assert torch.equal(whole.codes[i], alone.codes) and torch.equal(whole.scales[i], alone.scales)
    loud = torch.stack((torch.full((32,), 1e-3), torch.full((32,), 1e3)))
    assert (quantize(loud, "int4", 64).dequantize() == loud).all()
    assert (quantize(loud, "int4", 64, flat=True).dequantize()[0] == 0).all()  # what a block across tokens does


@pytest.mark.parametrize("name", SYMMETRIC)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(name):
    x = torch.rand(8, 32, generator=torch.Generator().manual_seed(3)) * 2 - 1
    x = x.clamp(min=CODECS[name].levels[0])  # the dynamic map ends at -0.993
    x[:, 5] = 1.0
    tries = torch.stack([quantize(x, name, 32, rounding="stochastic", generator=s).dequantize() for s in range(400)])
    gap = 2 * CODECS[name].half_gap
    assert (tries - x).abs().max() <= gap * (1 + 1e-5)
    deviation = tries.std(0) / math.sqrt(400)
    assert ((tries.mean(0) - x).abs() <= 5 * deviation + 1e-6).all()
    assert (tries[:, :, 5] == 1.0).all()
    if name != "e5m2":
        assert (quantize(x, name, 32).dequantize() - x).abs().mean() < (tries - x).abs().mean()


def test_the_same_seed_rounds_the_same_and_generators_advance():
    x = torch.randn(3, 50)
    first, again, other = (quantize(x, rounding="stochastic", generator=s).codes for s in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)
    g = torch.Generator().manual_seed(0)
    one, two = (quantize(x, rounding="stochastic", generator=g).codes for _ in range(2))
    assert not torch.equal(one, two)
    replay = quantize(x, rounding="stochastic", generator=torch.Generator().manual_seed(0)).codes
    assert torch.equal(one, replay)


def test_noise_is_uniform_and_its_neighbours_and_seeds_are_independent():
    u = uniform(5, 0, 100_000, torch.device("cpu"))
    assert u.min() >= 0 and u.max() < 1
    assert torch.histc(u, 50, 0, 1).sub(2000).abs().max() < 250  # 5.6 standard deviations
    for other in (u.roll(1), u.roll(64), uniform(6, 0, 100_000, u.device), uniform(5 + 2**32, 0, 100_000, u.device)):
        assert abs(float(torch.corrcoef(torch.stack((u, other)))[0, 1])) < 0.016
    assert torch.equal(uniform(5, 1000, 10, u.device), u[1000:1010])
    far = uniform(5, 2**33, 1000, u.device)
    assert not torch.equal(far, u[:1000])


@pytest.mark.parametrize("name", EIGHT)
def test_accumulation_is_decode_add_encode_in_place(name):
    x, y = _numbers(3, 200, spread=0.5), _numbers(3, 200, seed=1, spread=0.5)
    q = quantize(x, name, 64)
    before = (q.codes.data_ptr(), q.scales.data_ptr())
    expected = quantize(q.dequantize() + y, name, 64)
    assert accumulate_(q, y) is q and (q.codes.data_ptr(), q.scales.data_ptr()) == before
    assert torch.equal(q.codes, expected.codes) and torch.equal(q.scales, expected.scales)
    zero = quantized_zeros((3, 200), name, 64)
    assert zero.flat and (zero.dequantize() == 0).all()
    accumulate_(zero, y.to(torch.bfloat16))
    same = quantize(y.to(torch.bfloat16), name, 64, flat=True)
    assert torch.equal(zero.dequantize(), same.dequantize(torch.float32))


def test_accumulated_error_grows_as_the_square_root_of_the_number_of_terms():
    """Measured against the float32 sum of M normal gradients; the constants are those of the formats."""
    expected = {"dynamic8": (0.0108, 0.0231, 0.0630), "int8": (0.0070, 0.0148, 0.0396)}
    for name, targets in expected.items():
        g = torch.Generator().manual_seed(4)
        total, q, errors = torch.zeros(2**15), quantized_zeros((2**15,), name, 256), {}
        for m in range(1, 65):
            x = torch.randn(2**15, generator=g)
            total += x
            accumulate_(q, x)
            errors[m] = float((q.dequantize() - total).norm() / total.norm())
        assert [errors[m] for m in (1, 8, 64)] == pytest.approx(targets, rel=0.1)
        assert 0.42 < math.log(errors[64] / errors[8]) / math.log(8) < 0.55
