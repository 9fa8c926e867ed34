"""The quantising kernels in Triton's interpreter, bit for bit against the reference, and their compiled code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (it exists on Linux only)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dist_lib.kernels import quantize as kernels  # noqa: E402
from dist_lib.ops import CODECS, accumulate_, quantize, quantized_zeros  # noqa: E402
from dist_lib.ops.codecs import tables  # noqa: E402

# The interpreter converts NaN to an integer and divides by zero in lanes whose result is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

CPU = torch.device("cpu")


def _same(left, right):
    """Equal bit for bit, NaN included."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(7.0).view(view), right.nan_to_num(7.0).view(view)
    )


def _numbers(shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape[0], 1, generator=g))).to(dtype)
    if shape[0] > 2:
        x[1, 3], x[2, -1] = float("nan"), -float("inf")
    x[0, ::5] = 0.0
    return x


def _launch(q, x, seed, **options):
    codes, scales = torch.full_like(q.codes, 255), torch.full_like(q.scales, 7.0)
    rows = (1, -1) if q.flat else x.shape
    kernels.quantize_launch(
        x.view(rows),
        codes.view(rows[0], -1),
        scales.view(rows[0], -1, *scales.shape[2:]),
        CODECS[q.codec],
        tables(q.codec, CPU),
        q.block_size,
        seed,
        interpreted=True,
        **options,
    )
    return codes, scales


@pytest.mark.parametrize("seed", [-1, 3, 2**61 + 12345], ids=["nearest", "stochastic", "long seed"])
@pytest.mark.parametrize("name", list(CODECS))
def test_codes_scales_and_numbers_equal_the_reference(name, seed):
    how = ("nearest", None) if seed < 0 else ("stochastic", seed)
    for shape, block, scale_dtype, dtype in [
        ((4, 128), 64, torch.float32, torch.bfloat16),
        ((5, 77), 32, torch.float16, torch.float32),
        ((3, 33), 64, torch.float32, torch.float16),
    ]:
        x = _numbers(shape, dtype)
        q = quantize(x, name, block, scale_dtype, *how)
        codes, scales = _launch(q, x, seed)
        assert torch.equal(codes, q.codes) and _same(scales, q.scales)
        out = torch.empty_like(x)
        kernels.dequantize_launch(q.codes, q.scales, out, CODECS[name], tables(name, CPU), block, interpreted=True)
        assert _same(out, q.dequantize())


@pytest.mark.parametrize("name", ["fp4", "int6", "int4_minmax", "dynamic8"])
def test_a_long_row_is_split_and_the_noise_goes_on(name):
    x = _numbers((1, 3 * 32 + 5), torch.float32)[0]
    q = quantize(x, name, 32, rounding="stochastic", generator=9, flat=True)
    codes, scales = torch.zeros_like(q.codes), torch.zeros_like(q.scales)
    kernels.quantize_launch(
        x[None], codes[None], scales[None], CODECS[name], tables(name, CPU), 32, 9, interpreted=True, tile=64
    )
    assert torch.equal(codes, q.codes) and torch.equal(scales, q.scales)


@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].bits == 8])
def test_accumulation_in_one_pass_equals_the_reference(name):
    for shape, flat in (((3, 40), False), ((1, 167), True)):
        for scale_dtype in (torch.float32, torch.float16):
            sums = [quantized_zeros(shape, name, 32, scale_dtype, flat=flat) for _ in range(2)]
            for seed in range(3):
                x = _numbers(shape, torch.bfloat16, seed)
                accumulate_(sums[0], x)
                codes, scales = sums[1].codes.view(shape[0], -1), sums[1].scales.view(shape[0], -1)
                table = tables(name, CPU)
                kernels.quantize_launch(
                    x, codes, scales, CODECS[name], table, 32, -1, accumulate=True, interpreted=True
                )
            assert torch.equal(sums[0].codes, sums[1].codes) and _same(sums[0].scales, sums[1].scales)


def test_extreme_blocks_as_the_reference():
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    x *= torch.tensor([2.0**e for e in (125, 60, 0, -40, -100, -109, -112, -127, -149)])[:, None]
    for name in ("fp4", "int8", "e5m2", "int4_minmax"):
        q = quantize(x, name, 32)
        codes, scales = _launch(q, x, -1)
        assert torch.equal(codes, q.codes) and _same(scales, q.scales)
        out = torch.empty_like(x)
        kernels.dequantize_launch(q.codes, q.scales, out, CODECS[name], tables(name, CPU), 32, interpreted=True)
        assert _same(out, q.dequantize())


def test_ties_fall_as_in_the_reference():
    """Numbers exactly between two levels, of both signs, in bfloat16 where they are frequent."""
    for name in ("e2m1", "int4", "int8", "e4m3", "e5m2"):
        levels = torch.tensor(CODECS[name].levels, dtype=torch.float64)
        middles = ((levels[1:] + levels[:-1]) / 2).float()
        x = torch.cat((middles, torch.ones(1), torch.zeros(-(len(middles) + 1) % 32)))[None].view(-1, 32).contiguous()
        x[:, 31] = 1.0
        q = quantize(x, name, 32)
        assert torch.equal(_launch(q, x, -1)[0], q.codes)


def test_an_interpreted_launch_leaves_triton_as_it_was():
    x = _numbers((2, 64), torch.float32)
    _launch(quantize(x, "fp4", 32), x, -1)
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        kernels.decode(None)
    assert _compile("dequantize", "fp4", 90).asm["cubin"]


# ---- compiled code ------------------------------------------------------------------------------------------------


def _compile(which, name, capability, even=True, accumulate=False, tile=4096, block=128):
    codec, table = CODECS[name], tables(name, CPU)
    constants = kernels.constants(codec, table) | {"EVEN": even, "ROWS": tile // block, "BLOCK": block}
    if which == "quantize":
        kernel = kernels.quantize_kernel
        constants |= {"HALF": False, "STOCHASTIC": False, "ACCUMULATE": accumulate}
    else:
        kernel = kernels.dequantize_kernel
        constants |= {"INTERPRETED": False}
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "codes_ptr": "*u8"}
    signature, attributes, constexprs = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[argument] = "constexpr", constants[argument]
            continue
        signature[argument] = pointers.get(argument, "*fp32") if argument.endswith("_ptr") else "i64"
        if argument not in ("first", "seed"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernels.OPTIONS)


def _resources(compiled, tmp_path):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = str(tool) if tool.exists() else shutil.which("cuobjdump")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [binary, "--dump-resource-usage", str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("which", "name", "accumulate"),
    [("quantize", "fp4", False), ("dequantize", "fp4", False), ("quantize", "int8", True), ("quantize", "int5", False)],
    ids=["quantize fp4", "dequantize fp4", "accumulate int8", "quantize int5"],
)
def test_compiled_code_moves_16_bytes_at_a_time_and_does_not_spill(which, name, accumulate, capability, tmp_path):
    compiled = _compile(which, name, capability, accumulate=accumulate)
    usage = _resources(compiled, tmp_path)
    assert (
        usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 168
    )  # three blocks of threads a multiprocessor
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v8\.b32", ptx), "numbers are not loaded by 16 bytes"
    assert re.search(r"st\.global\S*\.v4\.b32|st\.global\S*\.v8\.b32", ptx), "results are not stored by 16 bytes"
    assert not re.search(r"ld\.global\S*\.b(8|16)\b", ptx), "some loads take one number"
    assert "fma.rn" not in ptx, "a product and a sum were fused: their one rounding differs from the reference"


@pytest.mark.parametrize("which", ["quantize", "dequantize"])
def test_rows_that_are_not_whole_blocks_do_not_spill_either(which, tmp_path):
    usage = _resources(_compile(which, "fp4", 90, even=False), tmp_path)
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 128


def test_offsets_are_64_bit_in_the_compiled_kernel():
    for which in ("quantize", "dequantize"):
        ir = _compile(which, "fp4", 90, even=False).asm["ttir"]
        pointers = [line for line in ir.splitlines() if "tt.addptr" in line and re.search(r"x1x", line)]
        assert pointers and all("x1xi64>" in line for line in pointers)
