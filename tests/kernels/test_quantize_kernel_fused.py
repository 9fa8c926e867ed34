"""The fused kernels in Triton's interpreter against the unfused reference, and their compiled code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (it exists on Linux only)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dist_lib.kernels import fused_norm_quantize as norms  # noqa: E402
from dist_lib.kernels import fused_swiglu as swiglu  # noqa: E402
from dist_lib.kernels.quantize import constants  # noqa: E402
from dist_lib.ops import CODECS, quantize, rms_norm_backward, rms_norm_quantize, swiglu_backward  # noqa: E402
from dist_lib.ops.codecs import tables  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Float32: another order of sums and another exp. bfloat16: those may cross a rounding boundary, one unit in the last.
CLOSE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}


def _inputs(rows, dim, dtype):
    g = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(rows, dim, generator=g).to(dtype) for _ in range(2))
    return x, grad, (1 + 0.3 * torch.randn(dim, generator=g)).to(dtype)


@DTYPES
@pytest.mark.parametrize(("dim", "block", "name"), [(128, 32, "fp4"), (165, 64, "int5"), (40, 64, "e4m3")])
def test_norm_and_quantise_in_one_read(dim, block, name, dtype):
    x, grad, weight = _inputs(5, dim, dtype)
    y, factor, q = rms_norm_quantize(x, weight, 1e-5, name, block, torch.float16)
    out = [torch.full_like(t, 3) for t in (y, factor, q.codes, q.scales)]
    table = tables(name, CPU)
    norms.norm_quantize_launch(x, weight, 1e-5, *out, CODECS[name], table, block, interpreted=True)
    assert torch.equal(out[2], q.codes) and torch.equal(out[3], q.scales)
    torch.testing.assert_close(out[1], factor, rtol=5e-7, atol=0)
    torch.testing.assert_close(out[0], y, **CLOSE[dtype])
    expected = rms_norm_backward(q, factor, weight, grad)
    rebuilt, grad_x = torch.full_like(x, 3), torch.full_like(x, 3)
    grad_weight = norms.norm_backward_launch(
        q.codes,
        q.scales,
        factor,
        weight,
        grad,
        rebuilt,
        grad_x,
        CODECS[name],
        table,
        block,
        programs=2,
        interpreted=True,
    )
    torch.testing.assert_close(rebuilt, expected[2], **CLOSE[dtype])
    torch.testing.assert_close(grad_x, expected[0], **CLOSE[dtype])
    torch.testing.assert_close(grad_weight, expected[1], **CLOSE[torch.float32])


def test_a_nan_in_the_row_reaches_everything():
    x, _, weight = _inputs(2, 64, torch.float32)
    x[1, 7] = float("nan")
    y, factor, q = rms_norm_quantize(x, weight, 1e-5, "fp4", 32)
    out = [torch.zeros_like(t) for t in (y, factor, q.codes, q.scales)]
    norms.norm_quantize_launch(x, weight, 1e-5, *out, CODECS["fp4"], tables("fp4", CPU), 32, interpreted=True)
    assert out[0][1].isnan().all() and out[1][1].isnan() and out[3][1].tolist()[0] != out[3][1].tolist()[0]
    assert out[0][0].isfinite().all() and torch.equal(out[3].isnan(), q.scales.isnan())


@DTYPES
@pytest.mark.parametrize(("dim", "block", "name"), [(128, 32, "fp4"), (165, 64, "int6"), (33, 32, "nf4")])
def test_decode_and_swiglu_backward_in_one_pass(dim, block, name, dtype):
    gate, up, _ = _inputs(4, dim, dtype)
    grad = torch.randn(4, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    a, b = quantize(gate, name, block), quantize(up, name, block)
    out = [torch.full_like(grad, 3) for _ in range(3)]
    swiglu.swiglu_backward_launch(
        (a.codes, a.scales), (b.codes, b.scales), grad, *out, CODECS[name], tables(name, CPU), block, interpreted=True
    )
    for ours, expected in zip(out, swiglu_backward(a, b, grad), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE[dtype])


def _compile(kernel, capability, tile, warps, name="fp4"):
    known = constants(CODECS[name], tables(name, CPU)) | tile
    known |= {"HALF": False, "EVEN": True, "BLOCK": 128, "INTERPRETED": False}
    bytes_ = ("codes_ptr", "gate_ptr", "up_ptr")
    floats = ("scales_ptr", "gate_scales_ptr", "up_scales_ptr", "factor_ptr", "partial_ptr", "values_ptr")
    floats += ("ranked_ptr", "midpoints_ptr")
    signature, attributes, constexprs = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in known:
            signature[argument], constexprs[argument] = "constexpr", known[argument]
        elif argument == "eps":
            signature[argument] = "fp32"
        else:
            pointer = "*u8" if argument in bytes_ else "*fp32" if argument in floats else "*bf16"
            signature[argument] = pointer if argument.endswith("_ptr") else "i32"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("which", ["norm_quantize", "norm_backward", "swiglu_backward"])
def test_compiled_code_moves_16_bytes_at_a_time_and_does_not_spill(which, capability, tmp_path):
    if which == "swiglu_backward":
        compiled = _compile(swiglu.swiglu_backward_kernel, capability, {"ROWS": 16}, 4)
    else:  # a row of 4096
        compiled = _compile(getattr(norms, which + "_kernel"), capability, {"BLOCKS": 32}, 4)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [str(tool) if tool.exists() else shutil.which("cuobjdump"), "--dump-resource-usage", str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 255
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v[48]\.b32", ptx) and re.search(r"st\.global\S*\.v[48]\.b32", ptx)
    assert not re.search(r"ld\.global\S*\.b(8|16)\b", ptx), "some loads take one number"
