"""Numbered equations of the chapter on quantised activations and gradients, each evaluated outside the library's code.

Sizes are exact fractions, codes are found by looking through all levels in plain Python, derivatives come from autograd
in float64, micro-batches in flight are counted along a pipeline's order of work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from dist_lib.agoq import Format, GradientFormat, norm_linear, swiglu_linear, wire_bytes
from dist_lib.agoq.bit_plan import LayerCost, Rule, in_flight, make_bit_plan
from dist_lib.agoq.collectives import simulate_all_reduce
from dist_lib.agoq.layer_memory import LayerShape, Layout, layer_units
from dist_lib.agoq.memory_model import SYSTEMS
from dist_lib.agoq.speed_model import published_speed
from dist_lib.async_pipeline import make_schedule
from dist_lib.checks import Equation
from dist_lib.ops import CODECS, accumulate_, quantize, quantized_zeros

# ---- sizes ----------------------------------------------------------------------------------------------------------

SHAPES = [(4, 1), (Fraction(43, 16), 1), (Fraction(7, 2), Fraction(1, 4)), (Fraction(43, 16), Fraction(1, 8))]


def _units(layout: Layout, scales: bool = False) -> Callable[..., float]:
    """What the library counts for a layer, U, at 4 bits."""

    def counted(phi: Fraction, kappa: Fraction, block: int = 0) -> float:
        bits = Fraction(32, block) if scales else Fraction(0)
        return float(layer_units(layout, LayerShape(Fraction(phi), Fraction(kappa)), scale_bits=bits))

    return counted


def _counted_in_flight(n: int, v: int, m: int) -> list[int]:
    """Largest number of forward passes without their backward pass, along each stage's order of work."""
    schedule = make_schedule("interleaved" if v > 1 else "1f1b", stages=n, micro_batches=m, batches=1, chunks=v)
    found = []
    for actions in schedule.actions:
        moves = [{"forward": 1, "backward": -1}.get(a.kind, 0) for a in actions]
        found.append(max(itertools.accumulate(moves)))
    return found


def _rule(rule: Rule, n: int, v: int, m: int) -> list[int]:
    plan = make_bit_plan(rule, layers=n * v, stages=n, micro_batches=m, chunks=v, cost=LayerCost(5, 11), widths=None)
    return [plan.bits_of_stage(s)[0] for s in range(n)]


def _ratio_bits(n: int, v: int, m: int) -> list[int]:
    held = _counted_in_flight(n, v, m)
    return [min(8, max(4, math.floor(Fraction(4 * held[0], h) + Fraction(1, 2)))) for h in held]


def _budget_bits(n: int, v: int, m: int) -> list[int]:
    held, fixed, coded = _counted_in_flight(n, v, m), 5, 11
    room = [(fixed + Fraction(coded, 4)) * Fraction(held[0], h) - fixed for h in held]
    return [min(16, max(4, math.floor(Fraction(16, coded) * r))) for r in room]


# ---- codes ----------------------------------------------------------------------------------------------------------

FP4 = [0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1]


def _numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _nearest_by_search(seed: int, block: int) -> list[float]:
    """Each number of some blocks replaced by the nearest of FP4's levels times the block's largest magnitude."""
    levels = sorted({s * v for v in FP4 for s in (-1, 1)})
    x, found = _numbers(3 * block, seed).tolist(), []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        a = max(abs(v) for v in part)
        found += [a * min(levels, key=lambda c, v=v, a=a: abs(v / a - c)) for v in part]  # type: ignore[misc]
    return found


def _worst_error(name: str) -> float:
    """Largest error of blocks that each hold a 1 and, together, run evenly from -1 to 1."""
    x = torch.linspace(-1, 1, 400 * 256).view(400, 256)
    x[:, 0] = 1.0
    return float((quantize(x, name, 256).dequantize() - x).abs().max())


def _half_gap(name: str) -> float:
    bits = {"int4": 4, "int5": 5, "int6": 6, "int8": 8}
    if name in bits:
        return 1 / float(2 ** bits[name] - 2)
    return max(float(b - a) for a, b in itertools.pairwise(FP4)) / 2


def _stored_bits(name: str, block: int, count: int = 4096) -> float:
    return quantize(torch.ones(count), name, block, flat=True).nbytes * 8 / count


# ---- gradients ------------------------------------------------------------------------------------------------------

EPS = 1e-5


def _operands(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def _norm_gradient(seed: int) -> list[float]:
    x, gain, grad = _operands(seed, (5, 12), (12,), (5, 12))
    r = 1 / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    n, h = x * r, grad * gain
    return (r * (h - n * (h * n).mean(-1, keepdim=True))).flatten().tolist()  # type: ignore[no-any-return]


def _norm_library(seed: int) -> list[float]:
    x, gain, grad = _operands(seed, (5, 12), (12,), (5, 12))
    x.requires_grad_()
    (y,) = norm_linear(x, gain, EPS, [torch.eye(12, dtype=torch.float64)], Format(None))
    return torch.autograd.grad(y, x, grad)[0].flatten().tolist()  # type: ignore[no-any-return]


def _swiglu_gradient(seed: int) -> list[float]:
    gate, up, grad = _operands(seed, (5, 12), (5, 12), (5, 12))
    s = 1 / (1 + torch.exp(-gate))
    both = torch.stack([grad * up * (s + gate * s * (1 - s)), grad * gate * s])
    return both.flatten().tolist()  # type: ignore[no-any-return]


def _swiglu_library(seed: int) -> list[float]:
    gate, up, grad = (t.requires_grad_() for t in _operands(seed, (5, 12), (5, 12), (5, 12)))
    y = swiglu_linear(gate, up, torch.eye(12, dtype=torch.float64), Format(None))
    return torch.stack(torch.autograd.grad(y, (gate, up), grad.detach())).flatten().tolist()  # type: ignore[no-any-return]


def _norm_error(width: int) -> float:
    """Relative error of a norm's input gradient when the input is FP4 in blocks of 128 and 1/RMS is recomputed."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(64, width, generator=generator) for _ in range(2))
    found = []
    for form in (Format("fp4", 128, exact_factor=False), Format(None)):
        leaf = x.clone().requires_grad_()
        (y,) = norm_linear(leaf, torch.ones(width), EPS, [torch.eye(width)], form)
        found.append(torch.autograd.grad(y, leaf, grad)[0])
    return float((found[0] - found[1]).norm() / found[1].norm())


def _accumulated(name: str, micro_batches: int) -> float:
    """Relative error of a sum of unrelated micro-gradients that is held in 8 bits."""
    generator, exact = torch.Generator().manual_seed(0), torch.zeros(2**16)
    held = quantized_zeros((2**16,), name, 256)
    for _ in range(micro_batches):
        g = torch.randn(2**16, generator=generator)
        exact += g
        accumulate_(held, g)
    return float((held.dequantize() - exact).norm() / exact.norm())


def _one_rounding(name: str) -> float:
    x = _numbers(2**16, 7)
    return float((quantize(x, name, 256, flat=True).dequantize() - x).norm() / x.norm())


def _int8(x: list[float], block: int) -> list[float]:
    found = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        step = max(abs(v) for v in part) / 127
        found += [step * round(v / step) for v in part]
    return found


def _reduced_by_hand(ranks: int, block: int) -> list[float]:
    """Mean over ranks of INT8 numbers, encoded once more; the shards are whole blocks."""
    rounded = [_int8(_numbers(2 * block * ranks, rank).tolist(), block) for rank in range(ranks)]
    return _int8([sum(column) / ranks for column in zip(*rounded, strict=True)], block)


def _reduced(ranks: int, block: int) -> list[float]:
    tensors = [_numbers(2 * block * ranks, rank) for rank in range(ranks)]
    return simulate_all_reduce(tensors, op="mean", form=GradientFormat("int8", block)).tolist()  # type: ignore[no-any-return]


FORWARD_MS, BACKWARD_MS, QUANTISED_MS = 114.06, 194.94, 116.11 + 200.2


EQUATIONS = [
    Equation(
        label="layer-bf16",
        latex=r"A_{\text{BF16}} = (9 + 3\kappa + 4\varphi)\, U",
        implemented_by="dist_lib.agoq.layer_memory.layer_units",
        evaluate=lambda phi, kappa: float(9 + 3 * Fraction(kappa) + 4 * Fraction(phi)),
        library=_units("bf16"),
        samples=SHAPES,
        rtol=0.0,
    ),
    Equation(
        label="layer-table1",
        latex=r"A_{\text{table}} = \bigl(2 + 3\kappa + q\,(3 + 2\varphi)\bigr)\, U, \qquad q = b/16",
        implemented_by="dist_lib.agoq.layer_memory.layer_units",
        evaluate=lambda phi, kappa: float(2 + 3 * Fraction(kappa) + Fraction(1, 4) * (3 + 2 * Fraction(phi))),
        library=_units("table1"),
        samples=SHAPES,
        rtol=0.0,
    ),
    Equation(
        label="layer-paper",
        latex=r"A_{\text{built}} = \bigl(3 + 3\kappa + q\,(3 + 2\varphi)\bigr)\, U, \qquad q = \frac{b + 32/B}{16}",
        implemented_by="dist_lib.agoq.layer_memory.layer_units",
        evaluate=lambda phi, kappa, block: float(
            3 + 3 * Fraction(kappa) + Fraction(4 + Fraction(32, block)) / 16 * (3 + 2 * Fraction(phi))
        ),
        library=_units("paper", scales=True),
        samples=[(*shape, block) for shape in SHAPES for block in (64, 128)],
        rtol=0.0,
    ),
    Equation(
        label="layer-shared",
        latex=r"A_{\text{shared}} = \bigl(2 + 2\kappa + q\,(2 + 2\varphi)\bigr)\, U",
        implemented_by="dist_lib.agoq.layer_memory.layer_units",
        evaluate=lambda phi, kappa, block: float(
            2 + 2 * Fraction(kappa) + Fraction(4 + Fraction(32, block)) / 16 * (2 + 2 * Fraction(phi))
        ),
        library=_units("shared", scales=True),
        samples=[(*shape, block) for shape in SHAPES for block in (64, 128)],
        rtol=0.0,
    ),
    Equation(
        label="parameter-bytes",
        latex=r"\underbrace{2}_{\text{weight}} + \underbrace{1 + 4/B}_{\text{gradient}} "
        r"+ \underbrace{4}_{\text{master}} + \underbrace{2 + 8/B'}_{\text{moments}}",
        implemented_by="dist_lib.agoq.memory_model.System.parameter_bytes",
        evaluate=lambda block, moments: 2 + 1 + 4 / block + 4 + 2 + 8 / moments,
        library=lambda block, moments: float(sum(SYSTEMS["og"].parameter_bytes().values())),
        samples=[(128, 256)],
        rtol=1e-12,
    ),
    Equation(
        label="nearest",
        latex=r"a = \max_i |x_i|, \qquad \hat x_i = a \cdot \arg\min_{c \in C} \left| \frac{x_i}{a} - c \right|",
        implemented_by="dist_lib.ops.quantize",
        evaluate=_nearest_by_search,
        library=lambda seed, block: quantize(_numbers(3 * block, seed), "fp4", block, flat=True).dequantize().tolist(),
        samples=[(0, 128), (1, 64), (2, 32)],
        rtol=1e-6,
    ),
    Equation(
        label="half-gap",
        latex=r"|\hat x_i - x_i| \le c\, a, \qquad c = \tfrac12 \max_k (C_{k+1} - C_k)",
        implemented_by="dist_lib.ops.Codec",
        evaluate=lambda name: [_half_gap(name)] * 2,
        library=lambda name: [CODECS[name].half_gap, _worst_error(name)],
        samples=[("fp4",), ("int4",), ("int5",), ("int6",), ("int8",)],
        rtol=5e-3,
    ),
    Equation(
        label="stored-bits",
        latex=r"b + 32/B",
        implemented_by="dist_lib.ops.quantized_nbytes",
        evaluate=lambda name, block: {"fp4": 4, "int5": 5, "int6": 6, "int8": 8}[name] + 32 / block,
        library=_stored_bits,
        samples=[("fp4", 64), ("fp4", 128), ("int5", 128), ("int6", 128), ("int8", 256)],
        rtol=0.0,
    ),
    Equation(
        label="norm-backward",
        latex=r"\frac{\partial \ell}{\partial x} = r \Bigl( h - n \cdot \tfrac1d \textstyle\sum_j h_j n_j \Bigr), "
        r"\quad r = \bigl(\tfrac1d \lVert x\rVert^2 + \epsilon\bigr)^{-1/2}, \; n = r x, \; h = \gamma \odot g",
        implemented_by="dist_lib.agoq.norm_linear",
        evaluate=_norm_gradient,
        library=_norm_library,
        samples=[(0,), (1,)],
        rtol=1e-12,
    ),
    Equation(
        label="swiglu-backward",
        latex=r"\frac{\partial \ell}{\partial x} = g \odot y \odot \bigl(s + x\, s\,(1-s)\bigr), \quad "
        r"\frac{\partial \ell}{\partial y} = g \odot x \odot s, \quad s = \sigma(x)",
        implemented_by="dist_lib.agoq.swiglu_linear",
        evaluate=_swiglu_gradient,
        library=_swiglu_library,
        samples=[(0,), (1,)],
        rtol=1e-12,
    ),
    Equation(
        label="norm-error",
        latex=r"\frac{\lVert \Delta\, \partial \ell / \partial x \rVert}{\lVert \partial \ell / \partial x \rVert} "
        r"\approx \frac{0.26}{\sqrt d}",
        implemented_by="dist_lib.agoq.norm_linear",
        evaluate=lambda width: 0.26 / math.sqrt(width),
        library=_norm_error,
        samples=[(256,), (1024,), (4096,)],
        rtol=0.15,
    ),
    Equation(
        label="in-flight",
        latex=r"N_i = \min(n - i + 1,\, m) \quad (v = 1), \qquad "
        r"N_i = \min\bigl(2(n-i) + (v-1)\,n + 1,\; m v\bigr) \quad (v > 1)",
        implemented_by="dist_lib.agoq.bit_plan.in_flight",
        evaluate=_counted_in_flight,
        library=lambda n, v, m: list(in_flight(n, m, v)),
        samples=[(4, 1, 8), (8, 1, 4), (4, 2, 8), (3, 4, 9), (8, 2, 16)],
        rtol=0.0,
    ),
    Equation(
        label="bits-ratio",
        latex=r"b_i = \min\Bigl(8,\; \max\bigl(4,\; \bigl\lfloor 4 N_1 / N_i + \tfrac12 \bigr\rfloor\bigr)\Bigr)",
        implemented_by="dist_lib.agoq.bit_plan.make_bit_plan",
        evaluate=_ratio_bits,
        library=lambda n, v, m: _rule("paper", n, v, m),
        samples=[(4, 2, 8), (8, 2, 16), (4, 1, 8)],
        rtol=0.0,
    ),
    Equation(
        label="bits-budget",
        latex=r"b_i = \Bigl\lfloor \tfrac{16}{a_q} \Bigl( \bigl(a_f + \tfrac{a_q}{4}\bigr) \tfrac{N_1}{N_i} - a_f "
        r"\Bigr) \Bigr\rfloor, \quad 4 \le b_i \le 16",
        implemented_by="dist_lib.agoq.bit_plan.make_bit_plan",
        evaluate=_budget_bits,
        library=lambda n, v, m: _rule("budget", n, v, m),
        samples=[(4, 2, 8), (8, 2, 16), (4, 1, 8)],
        rtol=0.0,
    ),
    Equation(
        label="accumulate-error",
        latex=r"\rho_M \approx \rho_1 \sqrt{(M + 1)/2}",
        implemented_by="dist_lib.agoq.QuantizedGradients",
        evaluate=lambda name, m: _one_rounding(name) * math.sqrt((m + 1) / 2),
        library=_accumulated,
        samples=[("dynamic8", 8), ("dynamic8", 32), ("int8", 8), ("int8", 32)],
        rtol=0.1,
    ),
    Equation(
        label="reduce",
        latex=r"\hat g = Q\Bigl( \tfrac1W \textstyle\sum_{r=0}^{W-1} Q(g_r) \Bigr)",
        implemented_by="dist_lib.agoq.collectives.all_reduce",
        evaluate=_reduced_by_hand,
        library=_reduced,
        samples=[(2, 64), (4, 128)],
        rtol=1e-4,
    ),
    Equation(
        label="wire",
        latex=r"\frac{2(W-1)}{W}\, N \Bigl(1 + \frac4B\Bigr) \text{ bytes}",
        implemented_by="dist_lib.agoq.wire_bytes",
        evaluate=lambda n, w, block: float(Fraction(2 * (w - 1), w) * n * (1 + Fraction(4, block))),
        library=lambda n, w, block: wire_bytes("all_reduce", n, w, GradientFormat("int8", block)).sent,
        samples=[(2**20, 2, 256), (2**20, 4, 256), (2**15, 8, 128)],
        rtol=0.0,
    ),
    Equation(
        label="speedup",
        latex=r"\frac{t_{\text{baseline}}}{t_{\text{AGoQ}}} = \frac{1 + f\, R / L}{o}",
        implemented_by="dist_lib.agoq.speed_model.LayerSpeed.speedup",
        evaluate=lambda r, n: (FORWARD_MS * (1 + r / n) + BACKWARD_MS) / QUANTISED_MS,
        library=lambda r, n: published_speed().speedup(r, n),
        samples=[(0, 10), (4, 10), (10, 10)],
        rtol=1e-9,
    ),
]
