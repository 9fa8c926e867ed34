"""The symmetric product in Triton's interpreter against float64, and its compiled code for three GPU generations."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (it exists on Linux only)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dist_lib.kernels.symmetric_matmul import launch, symmetric_kernel  # noqa: E402

SHAPES = [(1, 1, 1), (2, 5, 7), (1, 64, 64), (2, 65, 130), (1, 130, 33), (3, 16, 200)]


def _inputs(shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(shape, generator=g) / shape[2] ** 0.5
    c = torch.randn(shape[0], shape[1], shape[1], generator=g)
    return a.to(dtype), (c + c.mT).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64_and_is_symmetric_bit_for_bit(shape, dtype):
    a, c = _inputs(shape, dtype)
    out = launch(a, c=c, alpha=2.0, beta=-0.5, diagonal=3.0, block_m=64, block_k=64, interpreted=True)
    eye = torch.eye(shape[1], dtype=torch.float64)
    exact = 2 * a.double() @ a.double().mT - 0.5 * c.double() + 3 * eye
    assert torch.equal(out, out.mT)
    # One rounding to the result's dtype; the interpreter truncates bfloat16 where a GPU rounds.
    ulp = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert ((out.double() - exact).norm() / exact.norm()) < ulp


@pytest.mark.parametrize("size", [5, 70])
def test_products_of_two_polynomials_of_one_matrix(size):
    g = torch.randn(2, size, size, generator=torch.Generator().manual_seed(5)) / size**0.5
    left = launch(g, interpreted=True)
    right = launch(left, c=left, alpha=0.3, beta=-1.1, diagonal=0.7, interpreted=True)
    out = launch(left, right, left, beta=0.9, interpreted=True)
    exact = left.double() @ right.double() + 0.9 * left.double()
    assert torch.equal(out, out.mT)
    assert (out.double() - exact).norm() < 2e-6 * exact.norm()


@pytest.mark.parametrize("shape", [(2, 65, 130), (1, 130, 33)], ids=str)
def test_float32_is_no_worse_than_torch(shape):
    a, _ = _inputs(shape, torch.float32, seed=4)
    exact = a.double() @ a.double().mT
    ours = launch(a, interpreted=True).double()
    assert (ours - exact).norm() <= 2.0 * (torch.bmm(a, a.mT).double() - exact).norm() + 1e-7 * exact.norm()


def test_any_strides_and_a_batch_of_views():
    base = torch.randn(2, 40, 96)
    view = base[:, ::2, 1:81]
    torch.testing.assert_close(launch(view, interpreted=True), view @ view.mT, rtol=1e-4, atol=1e-4)
    turned = base.mT
    torch.testing.assert_close(launch(turned, interpreted=True), turned @ turned.mT, rtol=1e-4, atol=1e-4)


def test_rows_beyond_2_to_the_31_elements_are_found():
    """The third row starts past 2^31 elements, in memory that is reserved and hardly touched."""
    far = 2**30 + 64
    try:
        store = torch.empty(2 * far + 16, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this machine does not reserve 4.3 GB of address space")
    a = store.as_strided((1, 3, 16), (0, far, 1))
    a.copy_(torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(6)))
    torch.testing.assert_close(launch(a, interpreted=True).float(), a.float() @ a.float().mT, rtol=2e-3, atol=2e-3)


def test_offsets_do_not_wrap_at_2_to_the_31():
    """Address arithmetic with rows is 64-bit in the compiled kernel: a 32-bit row offset would wrap."""
    ir = _compile(90, torch.float16).asm["ttir"]
    pointers = [line for line in ir.splitlines() if "tt.addptr" in line]
    assert pointers and not [line for line in pointers if re.search(r"tensor<\d+x1xi32>", line)]


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="shape"):
        launch(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="b \\(1, 3, 3\\)"):
        launch(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match="c has shape"):
        launch(torch.zeros(1, 2, 3), c=torch.zeros(1, 3, 3))
    assert launch(torch.zeros(0, 2, 3)).shape == (0, 2, 2)


def _compile(capability, dtype, has_c=True):
    short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    integers = ("m", "n", "a_batch", "a_row", "b_batch", "b_row", "c_batch", "c_row", "out_batch", "out_row")
    signature = {f"{name}_ptr": f"*{short}" for name in ("a", "b", "c", "out")}
    signature |= {name: "i64" if "batch" in name else "i32" for name in integers}
    signature |= dict.fromkeys(("alpha", "beta", "diagonal"), "fp32")
    block = {"BLOCK_M": 64, "BLOCK_K": 32} if dtype == torch.float32 else {"BLOCK_M": 128, "BLOCK_K": 64}
    constants = {"HAS_C": has_c, "UPCAST": False, **block}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(4 + len(integers))}
    source = ASTSource(fn=symmetric_kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4 if dtype == torch.float32 else 8, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _resources(compiled, tmp_path):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = str(tool) if tool.exists() else shutil.which("cuobjdump")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    out = subprocess.run(
        [binary, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}


INSTRUCTIONS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.mark.parametrize(
    ("capability", "dtype", "has_c"),
    [
        (80, torch.float16, True),
        (90, torch.float16, True),
        (100, torch.float16, True),
        (90, torch.float16, False),
        (90, torch.bfloat16, True),
    ],
    ids=str,
)
def test_compiled_code_uses_tensor_cores_and_does_not_spill(capability, dtype, has_c, tmp_path):
    compiled = _compile(capability, dtype, has_c)
    ptx = compiled.asm["ptx"]
    assert ptx.count(INSTRUCTIONS[capability]) > 0
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*", ptx)
    assert copies, "loads are not pipelined"
    assert all(re.search(r"\], (16|0x10)\b", copy) for copy in copies), "copies of under 16 bytes"
    usage = _resources(compiled, tmp_path)
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 255
    assert compiled.metadata.shared <= 163 * 1024  # what a block may have on sm_80; more on the later ones


def test_float32_compiles_without_spills_and_without_rounding_to_tf32(tmp_path):
    compiled = _compile(90, torch.float32)
    assert "tf32" not in compiled.asm["ptx"]
    usage = _resources(compiled, tmp_path)
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0
