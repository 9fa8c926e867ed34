"""GPU checks of block quantisation: codes bit for bit as on a CPU, fused kernels, times, and memory held by layers.

Codes, scales and decoded numbers of every format must equal the CPU reference in every bit, with nearest and with
stochastic rounding, in whole blocks and short ones, with NaN and infinities among them. The fused kernels are held
against the unfused reference. Times stand beside the unfused pair of the same run and beside the copy that this run
measured. Last, layers of the shape of an 8B model: bytes held for backward against the formula, and what it costs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_lib.agoq import ActivationPlan, quantize_activations, restore_activations
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.models.decoder import rotary_table
from dist_lib.ops import (
    CODECS,
    Quantized,
    accumulate_,
    quantize,
    quantize_uses_kernel,
    quantized_nbytes,
    quantized_zeros,
    rms_norm_backward,
    rms_norm_quantize,
    swiglu_backward,
)
from labs.gpu_check import GpuReport

Case = tuple[tuple[int, int], torch.dtype, torch.dtype, str, bool]
# Few: each needs kernels of its own, and compiling them is what takes the time.
CASES: tuple[Case, ...] = (
    ((7, 256), torch.bfloat16, torch.float32, "nearest", False),
    ((5, 200), torch.bfloat16, torch.float32, "nearest", False),
    ((3, 1667), torch.float32, torch.float16, "stochastic", True),
)
EIGHT_B = DecoderConfig(
    vocab_size=256,
    d_model=4096,
    n_layers=2,
    n_heads=32,
    n_kv_heads=32,
    d_ff=14336,
    max_seq_len=8192,
    tie_embeddings=True,
)
ROW_SECONDS = 15.0  # a row is started only if this much time is left


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in every bit; NaN equals NaN."""
    left, right = left.cpu(), right.cpu()
    nan = torch.equal(left.isnan(), right.isnan())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return nan and torch.equal(left.nan_to_num(7.0).view(bits), right.nan_to_num(7.0).view(bits))


def _numbers(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows of very different size, with zeros, a NaN and an infinity; on the CPU."""
    x = torch.randn(shape) * torch.exp(2 * torch.randn(shape[0], 1))
    x[:, ::7] = 0.0
    if shape[0] > 2:
        x[1, 3], x[2, -1] = float("nan"), float("-inf")
    return x.to(dtype)


def _alike(ours: Quantized, reference: Quantized) -> bool:
    codes = torch.equal(ours.codes.cpu(), reference.codes)
    return codes and same_bits(ours.scales, reference.scales) and same_bits(ours.dequantize(), reference.dequantize())


def check_codecs(report: GpuReport, device: str, cases: Sequence[Case] = CASES) -> None:
    """Every format in a few cases that cover dtypes, scales, roundings and short blocks: the CPU's in every bit."""
    for name in CODECS:
        good = True
        for shape, dtype, scale_dtype, rounding, flat in cases:
            x = _numbers(shape, dtype)
            seed = 12345 if rounding == "stochastic" else None
            pair = [quantize(t, name, 64, scale_dtype, rounding, seed, flat=flat) for t in (x.to(device), x)]
            good &= _alike(*pair)
        report.check(f"{name}: codes, scales and numbers equal the CPU's in every bit", good)


def check_accumulation(report: GpuReport, device: str) -> None:
    """Sums of three terms in the 8-bit formats: equal to the CPU's in every bit."""
    for name in (n for n in CODECS if CODECS[n].bits == 8):
        sums = [quantized_zeros((5003,), name, 128, device=d) for d in (device, "cpu")]
        for _ in range(3):
            x = torch.randn(5003).bfloat16()
            for total in sums:
                accumulate_(total, x.to(total.codes.device))
        report.check(f"{name}: a sum of three equals the CPU's in every bit", _alike(*sums))


def check_fused(report: GpuReport, device: str, rows: int = 33, dims: Sequence[int] = (256, 576, 4096)) -> None:
    """The fused kernels against the unfused reference on the CPU, in float32."""
    for dim in dims:
        x, grad = torch.randn(rows, dim), torch.randn(rows, dim)
        weight = 1 + 0.3 * torch.randn(dim)
        mine = rms_norm_quantize(x.to(device), weight.to(device), 1e-5)
        theirs = rms_norm_quantize(x, weight, 1e-5)
        report.check(f"norm and quantise, {dim}: codes equal the CPU's in every bit", _alike(mine[2], theirs[2]))
        pairs = [(mine[0], theirs[0]), (mine[1], theirs[1])]
        back = rms_norm_backward(mine[2], mine[1], weight.to(device), grad.to(device))
        pairs += zip(back, rms_norm_backward(theirs[2], theirs[1], weight, grad), strict=True)
        up = torch.randn(rows, dim)
        codes = [quantize(t.to(device)) for t in (x, up)]
        pairs += zip(
            swiglu_backward(codes[0], codes[1], grad.to(device)),
            swiglu_backward(quantize(x), quantize(up), grad),
            strict=True,
        )
        apart = max(float((a.cpu() - b).norm() / b.norm()) for a, b in pairs)
        report.check(f"norm and SwiGLU forward and backward, {dim}", apart < 1e-5, f"apart by {apart:.1e}", apart=apart)


def check_offsets(report: GpuReport) -> None:
    """Past 2^31 elements: the last blocks of a tensor of 2^31 + 2^20 numbers."""
    count = 2**31 + 2**20
    if torch.cuda.mem_get_info()[0] < 3 * 2 * count:
        report.add("2^31 elements", "left out: this GPU has too little memory for it")
        return
    x = torch.zeros(count, device="cuda", dtype=torch.bfloat16)
    x[-(2**20) :] = torch.randn(2**20, device="cuda")
    q = quantize(x, "fp4", 128, flat=True)
    out = dataclasses.replace(q, dtype=torch.bfloat16).dequantize()
    tail = quantize(x[-(2**20) :].cpu(), "fp4", 128, flat=True).dequantize()
    report.check("past 2^31 elements", same_bits(out[-(2**20) :], tail) and not bool(out[: 2**20].any()))


def _apart(total: Quantized, x: Tensor) -> Quantized:
    """What accumulation does, as three operations."""
    return quantize(total.dequantize() + x, total.codec, total.block_size, flat=True)


def time_kernels(report: GpuReport, elements: int = 2**30) -> None:
    """Quantise, dequantise and accumulate, bytes counted, beside the copy of this run."""
    x = torch.randn(elements, device="cuda", dtype=torch.bfloat16)
    for name, block in (("fp4", 128), ("nf4", 128), ("int5", 128), ("int8", 128), ("dynamic8", 256)):
        if report.seconds_left() < ROW_SECONDS:
            report.add(name, "not timed: the time budget is nearly used up")
            return
        q = quantize(x, name, block, flat=True)
        moved = x.nbytes + q.nbytes
        label = f"{elements / 2**30:g} Gi numbers, {name}, block {block}"
        report.row(f"quantise {label}", report.time(partial(quantize, x, name, block, flat=True)), nbytes=moved)
        report.row(f"dequantise {label}", report.time(q.dequantize), nbytes=moved)
        if CODECS[name].bits == 8:
            total = quantized_zeros((elements,), name, block, device="cuda")
            report.row(
                f"accumulate {label}",
                report.time(partial(accumulate_, total, x)),
                report.time(partial(_apart, total, x), samples=5),
                nbytes=x.nbytes + 2 * q.nbytes,
            )


def time_fusions(report: GpuReport, rows: int = 65536, dim: int = 4096) -> None:
    """Each fused kernel against its unfused pair in the same run."""
    if report.seconds_left() < ROW_SECONDS:
        report.add("fusions", "not timed: the time budget is nearly used up")
        return
    x, grad = (torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(dim, device="cuda", dtype=torch.bfloat16)
    _, factor, q = rms_norm_quantize(x, weight, 1e-5)
    up = quantize(torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16))

    def apart() -> tuple[Tensor, Quantized]:
        return F.rms_norm(x, (dim,), weight, 1e-5), quantize(x)

    def norm_apart() -> tuple[Tensor, Tensor]:
        n = q.dequantize() * factor[:, None].bfloat16()
        inner = grad * weight
        return factor[:, None] * (inner - n * (inner * n).mean(-1, keepdim=True)), (grad * n).sum(0)

    def swiglu_apart() -> tuple[Tensor, Tensor, Tensor]:
        g, u = q.dequantize(), up.dequantize()
        s = torch.sigmoid(g)
        return grad * u * (s + g * s * (1 - s)), grad * g * s, g * s * u

    label = f"{rows}x{dim}, fp4"
    for name, ours, unfused, moved in (
        ("norm and quantise", lambda: rms_norm_quantize(x, weight, 1e-5), apart, 2 * x.nbytes + q.nbytes),
        ("norm backward", lambda: rms_norm_backward(q, factor, weight, grad), norm_apart, 3 * x.nbytes + q.nbytes),
        ("SwiGLU backward", lambda: swiglu_backward(q, up, grad), swiglu_apart, 4 * x.nbytes + 2 * q.nbytes),
    ):
        report.row(f"{name} {label}, against apart", report.time(ours), report.time(unfused), nbytes=moved)


def held_formula(config: DecoderConfig, batch: int, seq: int, plan: ActivationPlan) -> int:
    """Bytes that one converted bfloat16 layer holds for backward (layout ``"shared"``, no grouped keys)."""
    d, tokens = config.d_model, batch * seq
    stored = [
        quantized_nbytes((tokens, w), str(plan.codec), plan.block_size, plan.scale_dtype) for w in (d, config.d_ff)
    ]
    attention = 4 * tokens * d * 2 + tokens * config.n_heads * 4
    return 2 * sum(stored) + attention + 2 * tokens * 4


def random_model(config: DecoderConfig, device: str) -> Decoder:
    """A bfloat16 model made on its device: gains near 1, matrices near 0."""
    with torch.device("meta"):
        model = Decoder(config).bfloat16()
    model.to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=2.0 - min(parameter.ndim, 2), std=0.02)
    return model


def check_layers(report: GpuReport, config: DecoderConfig = EIGHT_B, seq: int = 8192) -> None:
    """Layers of an 8B model: bytes held after a forward pass against the formula; times with and without codes."""
    plan = ActivationPlan("fp4", 128)
    model = random_model(config, "cuda")
    cos, sin = rotary_table(config, seq, torch.device("cuda"))
    cos, sin = cos.bfloat16(), sin.bfloat16()  # no copies of them in the count
    x = torch.randn(1, seq, config.d_model, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Tensor:
        y = x
        for layer in model.layers:
            y = layer(y, cos, sin)
        return y

    def measure() -> tuple[int, float, float]:
        for _ in range(2):
            forward().sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = forward()
        held = torch.cuda.memory_allocated() - before - out.nbytes
        del out
        return held, report.time(forward, samples=5).median_s, report.time(_both(forward), samples=5).median_s

    def _both(fn: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: fn().backward(torch.ones_like(x))

    plain = measure()
    quantize_activations(model, plan)
    ours = measure()
    restore_activations(model)
    # The layers' own output, the next layer's input, is kept by nobody once encoded; the plain layers keep it.
    expected = config.n_layers * held_formula(config, 1, seq, plan)
    close = abs(ours[0] / expected - 1) < 0.05
    text = f"{ours[0] / 1e9:.3f} GB, formula {expected / 1e9:.3f} GB; plain layers {plain[0] / 1e9:.3f} GB"
    report.check(f"bytes held by {config.n_layers} layers, S {seq}", close, text, held=ours[0], formula=expected)
    for name, mine, theirs in (
        ("forward", ours[1], plain[1]),
        ("backward", ours[2] - ours[1], plain[2] - plain[1]),
        ("forward and backward", ours[2], plain[2]),
    ):
        over = mine / theirs - 1
        report.add(f"time of {name}", f"{mine * 1e3:.2f} ms, {over:+.1%} of the plain layers", over=over)


def run(report: GpuReport) -> None:
    """All checks, then all times."""
    torch.seed()
    if not quantize_uses_kernel(torch.empty(1, device="cuda")):
        report.add("kernels", "left out: Triton is missing or this GPU is older than sm_80; torch serves everything")
    begin = time.monotonic()
    check_codecs(report, "cuda")
    check_accumulation(report, "cuda")
    check_fused(report, "cuda")
    report.add("checks took", f"{time.monotonic() - begin:.0f} s, most of it compiling")
    for step in (check_offsets, time_kernels, time_fusions, check_layers):
        try:
            step(report)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            report.add(step.__name__, "left out: this GPU has too little memory for it")
