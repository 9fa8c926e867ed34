"""SwiGLU with encoding, and the weight gradient from codes: in Triton's interpreter against torch, and compiled."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton", reason="Triton is not installed (it exists on Linux only)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dist_lib.kernels.coded_weight_gradient import weight_gradient_kernel, weight_gradient_launch  # noqa: E402
from dist_lib.kernels.fused_swiglu import swiglu_quantize_kernel, swiglu_quantize_launch  # noqa: E402
from dist_lib.kernels.quantize import constants  # noqa: E402
from dist_lib.ops import CODECS, quantize  # noqa: E402
from dist_lib.ops.codecs import tables  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Float32: another order of sums and another exp. bfloat16: those may cross a rounding boundary, one unit in the last.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}


def _numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("scales", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "block", "name"), [(128, 32, "fp4"), (165, 64, "int6"), (33, 32, "nf4")])
def test_swiglu_encodes_what_it_reads(dim, block, name, scales, dtype):
    gate, up = _numbers(4, dim, seed=1, dtype=dtype), _numbers(4, dim, seed=2, dtype=dtype)
    gate[2, 5], up[1, 3] = float("nan"), float("inf")
    a, b = (quantize(x, name, block, scales) for x in (gate, up))
    product = torch.full_like(gate, 3)
    coded = [(torch.full_like(q.codes, 3), torch.full_like(q.scales, 3)) for q in (a, b)]
    swiglu_quantize_launch(gate, up, product, *coded, CODECS[name], tables(name, CPU), block, interpreted=True)
    for q, (codes, found) in zip((a, b), coded, strict=True):
        assert torch.equal(codes, q.codes) and torch.equal(found.isnan(), q.scales.isnan())
        assert torch.equal(found.nan_to_num(), q.scales.nan_to_num())
    torch.testing.assert_close(product, F.silu(gate) * up, equal_nan=True, rtol=CLOSE[dtype]["rtol"], atol=1e-6)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "outputs", "dim", "block", "name"),
    [(64, 32, 128, 64, "fp4"), (37, 20, 165, 64, "int5"), (16, 16, 33, 32, "e4m3"), (70, 40, 64, 32, "int8")],
)
def test_weight_gradient_from_codes(tokens, outputs, dim, block, name, dtype):
    grad, x = _numbers(tokens, outputs, dtype=dtype), _numbers(tokens, dim, seed=1, dtype=dtype)
    q = quantize(x, name, block)
    out = torch.full((outputs, dim), 3.0, dtype=dtype)
    table = tables(name, CPU)
    weight_gradient_launch(
        grad, q.codes, q.scales, out, CODECS[name], table, block, interpreted=True, rows=16, outputs=16
    )
    expected = (grad.float().mT @ q.dequantize().float()).to(dtype)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    assert float((out - grad.float().mT @ x.float()).abs().max()) > (0.05 if name != "int8" else 0.005)


def test_a_bad_block_spoils_its_columns_and_no_other():
    grad, x = _numbers(20, 16), _numbers(20, 64, seed=1)
    x[3, 40] = float("inf")
    q, out = quantize(x, "fp4", 32), torch.zeros(16, 64)
    table = tables("fp4", CPU)
    weight_gradient_launch(
        grad, q.codes, q.scales, out, CODECS["fp4"], table, 32, interpreted=True, rows=16, outputs=16
    )
    assert out[:, 32:].isnan().all() and out[:, :32].isfinite().all()


def _compile(kernel, capability, tile, warps):
    known = constants(CODECS["fp4"], tables("fp4", CPU)) | tile
    known |= {"HALF": False, "EVEN": True, "BLOCK": 128, "INTERPRETED": False}
    bytes_ = ("codes_ptr", "gate_codes_ptr", "up_codes_ptr")
    floats = ("scales_ptr", "gate_scales_ptr", "up_scales_ptr", "values_ptr", "ranked_ptr", "midpoints_ptr")
    signature, attributes, constexprs = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in known:
            signature[argument], constexprs[argument] = "constexpr", known[argument]
        else:
            pointer = "*u8" if argument in bytes_ else "*fp32" if argument in floats else "*bf16"
            signature[argument] = pointer if argument.endswith("_ptr") else "i32"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _usage(compiled, folder):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [str(tool) if tool.exists() else shutil.which("cuobjdump"), "--dump-resource-usage", str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_swiglu_moves_16_bytes_at_a_time_and_does_not_spill(capability, tmp_path):
    compiled = _compile(swiglu_quantize_kernel, capability, {"ROWS": 16}, 4)
    usage = _usage(compiled, tmp_path)
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 255
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v[48]\.b32", ptx) and re.search(r"st\.global\S*\.v[48]\.b32", ptx)
    assert not re.search(r"ld\.global\S*\.b(8|16)\b", ptx), "some loads take one number"


@pytest.mark.parametrize(
    ("capability", "product"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, r"tcgen05.mma|mma.sync")]
)
def test_compiled_weight_gradient_multiplies_on_tensor_cores_and_does_not_spill(capability, product, tmp_path):
    compiled = _compile(weight_gradient_kernel, capability, {"ROWS": 64, "OUTPUTS": 128}, 8)
    usage = _usage(compiled, tmp_path)
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 255
    assert re.search(product, compiled.asm["ptx"])
    assert compiled.metadata.shared <= {80: 163, 90: 227, 100: 227}[capability] * 1024
