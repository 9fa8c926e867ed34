"""GPU checks of Newton-Schulz and of the symmetric kernel it is made of: right, then fast, against plain torch.

Right means: against float64 on inputs drawn anew in every run, with an error of the order of torch's own in the same
precision, and symmetric bit for bit. Times stand beside those of the iteration as three fused torch calls a step
(``bmm``, ``baddbmm``, ``baddbmm``) and beside the ceiling that this run measured. Where Triton is missing or the GPU is
older than sm_80, what needs the kernel is left out, and the report says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dist_lib.ops import choose_form, newton_schulz, newton_schulz_flops, normalise, resolve, uses_kernel
from dist_lib.ops.coefficients import Triple
from dist_lib.ops.symmetric import TRITON_FROM
from labs.gpu_check import GpuReport, Timing

TRIPLES = resolve("polar_express", 5)
# Sizes of the kernel checks: whole tiles, tails on every side, one number, a long sum.
SHAPES = ((1, 1, 1), (3, 127, 65), (2, 129, 300), (1, 640, 512), (2, 200, 4099))
# rows, columns, batch, and the ratio to the baseline that is good
ROWS = ((4096, 4096, 1, 1.25), (4096, 11008, 1, 1.7), (2048, 8192, 8, 1.5))
GATE_SIZES = (512, 1024, 1536, 2048, 3072, 4096)
TILES = ((128, 64), (128, 32), (64, 64), (64, 128))
ROUNDING = 0.05  # relative: what half precision moves when sums are formed in another order
ROW_SECONDS = 20.0  # a row is started only if this much time is left


def fused_direct(x: Tensor, triples: Sequence[Triple], dtype: torch.dtype) -> Tensor:
    """The usual form in torch alone: three matrix products a step, the additions fused. x is (b, m, n), m <= n."""
    y = normalise(x.float()).to(dtype)
    for a, b, c in triples:
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.to(x.dtype)


def plain_gram(x: Tensor, triples: Sequence[Triple], dtype: torch.dtype) -> Tensor:
    """The Gram form with one restart after two steps, in torch alone. x is (b, m, n), m <= n."""
    y = normalise(x.float()).to(dtype)
    for part in (triples[:2], triples[2:]):
        gram = torch.bmm(y, y.mT)
        q = torch.eye(x.shape[1], dtype=dtype, device=x.device).expand_as(gram)
        for a, b, c in part:
            z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            q = torch.baddbmm(q, q, z, beta=a)
            t = torch.baddbmm(gram, gram, z, beta=a)
            gram = torch.baddbmm(t, z, t, beta=a)
        y = torch.bmm(q, y)
    return y.to(x.dtype)


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative Frobenius distance; NaN stays NaN, which no limit accepts."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _draw(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def check_operators(report: GpuReport, device: str, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> None:
    """The kernel itself, also below the size from which the library uses it, with its three kinds of product."""
    from dist_lib.kernels.symmetric_matmul import launch

    interpreted = device == "cpu"
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        worst = {"error": 0.0, "of torch": 0.0}
        good, symmetric = True, True
        for shape in shapes:
            x = _draw(*shape, device=device, dtype=dtype) / shape[2] ** 0.5
            gram = launch(x, interpreted=interpreted)
            left = launch(gram, c=gram, alpha=0.3, beta=-0.5, diagonal=0.2, interpreted=interpreted)
            right = launch(gram, c=gram, alpha=0.1, beta=0.4, interpreted=interpreted)
            product = launch(left, right, left, beta=0.5, interpreted=interpreted)
            eye = torch.eye(shape[1], device=device, dtype=torch.float64)
            g, a, b = gram.double(), left.double(), right.double()
            plain_left = torch.baddbmm(gram, gram, gram, beta=-0.5, alpha=0.3)
            plain_left.diagonal(dim1=1, dim2=2).add_(0.2)
            for ours, plain, exact in (
                (gram, torch.bmm(x, x.mT), x.double() @ x.double().mT),
                (left, plain_left, 0.3 * g @ g - 0.5 * g + 0.2 * eye),
                (product, torch.baddbmm(left, left, right, beta=0.5), a @ b + 0.5 * a),
            ):
                error, theirs = distance(ours, exact), distance(plain, exact)
                # Not exactly twice: for one number both errors are single roundings of either size. Two polynomials
                # that are rounded commute only up to that, and the kernel computes one of the two halves.
                good &= error <= 2 * theirs + 2 * torch.finfo(dtype).eps
                symmetric &= torch.equal(ours, ours.mT)
                worst = {"error": max(worst["error"], error), "of torch": max(worst["of torch"], theirs)}
        text = ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
        report.check(f"symmetric products {dtype} against float64", good, text, **worst)
        report.check(f"symmetric products {dtype} are symmetric bit for bit", symmetric)


def check_newton_schulz(
    report: GpuReport, device: str, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype = torch.float16
) -> None:
    """Both forms in half precision against the same form in float64, beside torch's own error."""
    for shape in shapes:
        x = _draw(*shape, device=device)
        for form, plain in (("direct", fused_direct), ("gram", plain_gram)):
            exact = newton_schulz(x, form=form, compute_dtype=torch.float64)  # type: ignore[arg-type]
            ours = distance(newton_schulz(x, form=form, compute_dtype=dtype), exact)  # type: ignore[arg-type]
            theirs = distance(plain(x, TRIPLES, dtype), exact)
            text = f"error {ours:.1e}, of torch {theirs:.1e}"
            report.check(f"{form} {shape}", ours <= 2 * theirs + 5e-3, text, ours=ours, torch=theirs)


def check_edges(report: GpuReport, device: str, shape: tuple[int, int, int]) -> None:
    """Zero, NaN, scales, transposes and batch-mates, at a size of the caller's choice; shape[0] is at least 3."""
    x = _draw(*shape, device=device)
    clean = newton_schulz(x)
    poisoned = x.clone()
    poisoned[0] = 0
    poisoned[1, 0, 0] = float("nan")
    out = newton_schulz(poisoned)
    report.check(f"zero gives zero {shape}", not bool(out[0].any()))
    nan = bool(out[1].isnan().all())
    report.check(f"NaN stays in its matrix {shape}", nan and distance(out[2:], clean[2:]) < ROUNDING)
    # A GPU's matrix library may choose another kernel for another call: equal bits are promised on a CPU only.
    for name, again in {
        "scaled by 2^-100": newton_schulz(x * 2.0**-100),
        "scaled by 2^90": newton_schulz(x * 2.0**90),
        "transposed": newton_schulz(x.mT).mT,
        "alone instead of in a batch": torch.cat([newton_schulz(matrix[None]) for matrix in x]),
    }.items():
        apart = distance(again, clean)
        text = "the same bits" if torch.equal(again, clean) else f"apart by {apart:.1e}"
        report.check(f"{name} {shape}", apart < ROUNDING, text, apart=apart)


def check_graph(report: GpuReport, shape: tuple[int, int, int]) -> None:
    """Capture in a CUDA graph, replay on another input, and what the replay saves."""
    static = _draw(*shape, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles the kernel and fills the library's workspaces
        for _ in range(3):
            newton_schulz(static)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(static)
    fresh = _draw(*shape, device="cuda")
    static.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    apart = distance(captured, newton_schulz(fresh))
    report.check(f"CUDA graph {shape}", apart < ROUNDING, f"replayed on a new input: apart from eager by {apart:.1e}")
    flops = shape[0] * newton_schulz_flops(shape[1], shape[2], form="auto")
    replayed, eager = report.time(graph.replay), report.time(lambda: newton_schulz(fresh))
    report.row(f"graph of {shape} against eager", replayed, eager, flops=flops)


def _paired(
    report: GpuReport, ours: Callable[[], object], baseline: Callable[[], object]
) -> tuple[Timing, Timing, float]:
    """Both timed twice in turn, so that a clock that drifts meets both; the second time of each, and the ratio."""
    ratios = []
    for _ in range(2):
        a, b = report.time(ours), report.time(baseline)
        ratios.append(b.median_s / a.median_s)
    return a, b, statistics.mean(ratios)


def time_iterations(report: GpuReport) -> None:
    """The whole iteration at the sizes of large models: library against the fused torch form, in float16."""
    for m, n, batch, good in ROWS:
        if report.seconds_left() < ROW_SECONDS:
            report.add(f"{m}x{n}", "not timed: the time budget is nearly used up")
            continue
        x = _draw(batch, m, n, device="cuda")
        kernel = uses_kernel(x.half())
        form = choose_form(m, n, symmetric=kernel)
        ours, baseline, ratio = _paired(
            report, partial(newton_schulz, x), partial(fused_direct, x, TRIPLES, torch.float16)
        )
        # Useful work is that of the cheaper form with every symmetric product computed once.
        flops = batch * newton_schulz_flops(m, n, form=form, symmetric=True)
        name = f"Newton-Schulz {m}x{n}, batch {batch}, {form}, {'kernel' if kernel else 'torch'}"
        report.row(name, ours, baseline, flops=flops)
        report.add(f"{m}x{n} ratio", f"{ratio:.2f}; good is {good:g}", ratio=ratio, good=good)
        del x


def time_batching(report: GpuReport, size: int = 1024, batch: int = 16) -> None:
    """Small matrices in one batch against one after the other."""
    x = _draw(batch, size, size, device="cuda")
    flops = batch * newton_schulz_flops(size, size, form="auto")
    together, alone, _ = _paired(
        report, lambda: newton_schulz(x), lambda: [newton_schulz(matrix[None]) for matrix in x]
    )
    report.row(f"{batch} matrices {size}x{size} in a batch, against one by one", together, alone, flops=flops)


def time_gate(report: GpuReport) -> None:
    """The symmetric product alone against ``bmm``, by size: where the library's gate belongs on this GPU."""
    from dist_lib.kernels.symmetric_matmul import launch

    wins = []
    for size in GATE_SIZES:
        if report.seconds_left() < ROW_SECONDS:
            report.add(f"product {size}", "not timed: the time budget is nearly used up")
            return
        x = _draw(1, size, size, device="cuda", dtype=torch.float16) / size**0.5
        ours, baseline, ratio = _paired(report, partial(launch, x), partial(torch.bmm, x, x.mT))
        report.row(f"symmetric product {size}, float16, against bmm", ours, baseline, flops=size**3)
        wins.append((size, ratio))
    faster = [size for size, ratio in wins if ratio > 1]
    text = f"kernel faster at {', '.join(map(str, faster)) or 'none'} of {', '.join(map(str, GATE_SIZES))}"
    report.add("gate", f"{text}; the library's gate is {TRITON_FROM}", ratios=dict(wins))


def time_tiles(report: GpuReport, size: int = 4096) -> None:
    """The kernel with other tiles than its default, for whoever tunes it."""
    from dist_lib.kernels.symmetric_matmul import launch

    x = _draw(1, size, size, device="cuda", dtype=torch.float16) / size**0.5
    for block_m, block_k in TILES:
        if report.seconds_left() < ROW_SECONDS:
            return
        try:
            timing = report.time(partial(launch, x, block_m=block_m, block_k=block_k))
        except Exception as error:  # a tile that this GPU cannot hold says so in several ways
            report.add(f"tile {block_m}x{block_k}", f"refused: {type(error).__name__}")
            continue
        report.row(f"symmetric product {size}, tile {block_m}x{block_k}", timing, flops=size**3)


def run(report: GpuReport) -> None:
    """All checks, then all times."""
    torch.seed()  # fresh inputs in every run
    kernel = uses_kernel(torch.empty(1, TRITON_FROM, 1, device="cuda", dtype=torch.float16))
    if kernel:
        check_operators(report, "cuda")
    else:
        report.add("kernel", "left out: Triton is missing or this GPU is older than sm_80; torch serves everything")
    check_newton_schulz(report, "cuda", [(4, 200, 700), (2, 512, 1536), (1, TRITON_FROM, TRITON_FROM + 300)])
    check_edges(report, "cuda", (4, 160, 400))
    check_graph(report, (16, 512, 1536))
    if kernel:
        check_edges(report, "cuda", (3, TRITON_FROM, TRITON_FROM + 64))
        check_graph(report, (1, TRITON_FROM, 2 * TRITON_FROM))
    for step in (time_iterations, time_batching, *((time_gate, time_tiles) if kernel else ())):
        try:
            step(report)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            report.add(step.__name__, "left out: this GPU has too little memory for it")
