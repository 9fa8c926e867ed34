"""The diff and compaction kernels in Triton's interpreter against the definition, and their compiled code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (it exists on Linux only)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dist_lib.kernels import bf16_diff as kernels  # noqa: E402
from dist_lib.ops import bit_changes  # noqa: E402
from dist_lib.ops.bit_diff import TILE, compact_bits, diff_bits  # noqa: E402


def _pair(cells, share, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (cells,), generator=g).to(torch.int16)
    flips = torch.randint(1, 2**15, (cells,), generator=g).to(torch.int16)
    return old, torch.where(torch.rand(cells, generator=g) < share, old ^ flips, old)


def _interpreted(old, new):
    tiles = -(-old.numel() // TILE)
    mask, counts = torch.full((tiles * 128,), 7, dtype=torch.int32), torch.full((tiles,), 7, dtype=torch.int32)
    kernels.diff_launch(old, new, mask, counts, interpreted=True)
    ends = counts.cumsum(0, dtype=torch.int64)
    positions = torch.full((int(ends[-1]),), -1, dtype=torch.int64)
    kernels.compact_launch(mask, ends, positions, interpreted=True)
    return mask, counts, positions


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("cells", [1, 31, 33, TILE, TILE + 1, 3 * TILE - 5])
def test_mask_counts_and_order_equal_the_definition(cells, share):
    old, new = _pair(cells, share)
    mask, counts, positions = _interpreted(old, new)
    expected = diff_bits(old, new)
    assert torch.equal(mask, expected[0]) and torch.equal(counts, expected[1])
    assert torch.equal(positions, (old != new).nonzero().flatten())
    assert torch.equal(positions, compact_bits(*expected, positions.numel()))
    assert kernels.TILE == TILE


def test_bits_decide_and_not_values():
    """-0.0 differs from 0.0; a NaN does not differ from itself, but from one with another payload."""
    old = torch.tensor([0.0, float("nan"), float("nan"), 1.0, -0.0], dtype=torch.bfloat16)
    new = old.clone()
    new[0] = -0.0
    new.view(torch.int16)[2] ^= 1
    assert bit_changes(old, new).tolist() == [0, 2]
    assert _interpreted(old.view(torch.int16), new.view(torch.int16))[2].tolist() == [0, 2]


def test_the_operation_takes_any_shape_and_two_byte_dtype_and_nothing_else():
    for dtype in (torch.bfloat16, torch.float16, torch.int16):
        old = torch.arange(24, dtype=torch.int16).view(dtype).view(4, 6)
        new = old.clone()
        new.view(torch.int16)[1, 2] += 1
        assert bit_changes(old, new).tolist() == [8]
        assert bit_changes(old.t(), new.t()).tolist() == [9]
    assert bit_changes(torch.empty(0, dtype=torch.float16), torch.empty(0, dtype=torch.float16)).shape == (0,)
    with pytest.raises(TypeError, match="two bytes"):
        bit_changes(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="shapes"):
        bit_changes(torch.zeros(3).half(), torch.zeros(4).half())


def test_registered_as_torch_expects():
    old, new = _pair(TILE + 3, 0.1)
    mask, counts = diff_bits(old, new)
    torch.library.opcheck(torch.ops.dist_lib.diff_bits.default, (old, new))
    torch.library.opcheck(torch.ops.dist_lib.compact_bits.default, (mask, counts, int(counts.sum())))


# ---- compiled code ------------------------------------------------------------------------------------------------


def _compile(kernel, capability, even=True):
    types = {"old_ptr": "*i16", "new_ptr": "*i16", "ends_ptr": "*i64", "positions_ptr": "*i64", "cells": "i64"}
    known = {"EVEN": even, "WORDS": 128}
    signature, constants, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in known:
            signature[argument], constants[argument] = "constexpr", known[argument]
        else:
            signature[argument] = types.get(argument, "*i32")
            if argument.endswith("_ptr"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
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
def test_compiled_diff_loads_16_bytes_at_a_time_and_does_not_spill(capability, tmp_path):
    compiled = _compile(kernels.diff_kernel, capability)
    usage = _resources(compiled, tmp_path)
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 64
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 8, "32 cells a thread, of two tensors, 8 a load"
    assert not re.search(r"ld\.global\S*\.b(16|32)\b", ptx.replace(".v4.b32", "")), "some loads take fewer"


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_compaction_and_the_last_tile_do_not_spill(capability, tmp_path):
    for kernel, even in ((kernels.compact_kernel, True), (kernels.diff_kernel, False)):
        usage = _resources(_compile(kernel, capability, even), tmp_path)
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0 and usage["REG"] <= 128


def test_offsets_are_64_bit_in_the_compiled_kernels():
    for kernel in (kernels.diff_kernel, kernels.compact_kernel):
        lines = [line for line in _compile(kernel, 90).asm["ttir"].splitlines() if "tt.addptr" in line]
        assert lines and all("i64" in line.split(":")[-1].split(",")[-1] for line in lines)
