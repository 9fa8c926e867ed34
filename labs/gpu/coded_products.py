"""On a GPU: SwiGLU fused with quantising, and the weight gradient that decodes inside its product, checked and timed.

Neither is on by default: these rows say whether to ask for them (``fused=True``) on the GPU at hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dist_lib.ops import Quantized, quantize, quantize_uses_kernel, swiglu_quantize, weight_gradient
from labs.gpu_check import GpuReport

ROW_SECONDS = 4.0
CODECS_CHECKED = ("fp4", "nf4", "int5", "int8")
SHAPES = ((4096, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336))  # tokens, outputs, inputs of an 8B layer


def _same(left: Quantized, right: Quantized) -> bool:
    scales = left.scales.nan_to_num(-1.0), right.scales.nan_to_num(-1.0)
    return torch.equal(left.codes, right.codes) and torch.equal(*scales)


def _apart(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).norm() / right.float().norm())


def check_products(report: GpuReport, device: str, *, fused: bool, names: Sequence[str] = CODECS_CHECKED) -> None:
    """Compare both with their unfused form, on rows that blocks divide and on rows that they do not."""
    generator = torch.Generator().manual_seed(0)
    for name in names:
        for rows, width in ((64, 256), (77, 330)):
            gate, up, grad = (
                torch.randn(rows, n, generator=generator).to(device, torch.bfloat16) for n in (width, width, 48)
            )
            plain, *codes = swiglu_quantize(gate, up, name)
            ours, *mine = swiglu_quantize(gate, up, name, fused=fused)
            label = f"{name}, {rows}x{width}"
            good = all(_same(a, b) for a, b in zip(mine, codes, strict=True)) and _apart(ours, plain) < 4e-3
            report.check(f"SwiGLU and quantise, {label}: codes equal in every bit, product close", good)
            q = quantize(up, name)
            exact = grad.float().mT @ q.dequantize().float()
            apart = _apart(weight_gradient(grad, q, fused=fused), exact)
            text = f"apart by {apart:.1e}"
            report.check(f"weight gradient from codes, {label}", apart < 4e-3, text, apart=apart)


def time_products(
    report: GpuReport, device: str = "cuda", shapes: Sequence[tuple[int, int, int]] = SHAPES, *, fused: bool = True
) -> None:
    """Each against the same work in separate kernels, in the same run."""
    tokens, _, width = shapes[-1]
    gate, up = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    moved = 3 * gate.nbytes + 2 * quantize(gate).nbytes
    report.row(
        f"SwiGLU and quantise {tokens}x{width}, fp4, against apart",
        report.time(partial(swiglu_quantize, gate, up, fused=fused)),
        report.time(partial(swiglu_quantize, gate, up)),
        nbytes=moved,
    )
    for tokens, outputs, inputs in shapes:
        if report.seconds_left() < ROW_SECONDS:
            report.add("weight gradients", "not timed: the time budget is nearly used up")
            return
        grad = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
        q = quantize(torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16))
        report.row(
            f"weight gradient {outputs}x{inputs} from {tokens} tokens in fp4, against decoding first",
            report.time(partial(weight_gradient, grad, q, fused=fused)),
            report.time(partial(weight_gradient, grad, q)),
            flops=2 * tokens * outputs * inputs,
        )


def run(report: GpuReport) -> None:
    """All checks, then all times."""
    if not quantize_uses_kernel(torch.empty(1, device="cuda")):
        report.add("kernels", "left out: Triton is missing or this GPU is older than sm_80; torch serves everything")
        return
    begin = time.monotonic()
    check_products(report, "cuda", fused=True)
    report.add("checks took", f"{time.monotonic() - begin:.0f} s, most of it compiling")
    time_products(report)
