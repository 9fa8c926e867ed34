"""Numbered equations of the first chapter, each written out again without the library's own counting."""

from __future__ import annotations

import torch
from torch import Tensor

from dist_lib.checks import Equation
from dist_lib.comm import NetworkModel
from dist_lib.models import (
    Decoder,
    DecoderConfig,
    activation_bytes,
    get_config,
    parameter_counts,
    training_bytes,
    training_flops,
)

ODD = DecoderConfig(vocab_size=37, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=20, max_seq_len=64)
NAMED = [get_config(name) for name in ("tiny-0.3m", "llama2-7b", "llama3-8b")]
SHAPES = [(c, b, s) for c in (ODD, *NAMED) for b, s in ((1, 16), (3, 50))]


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens, targets = (torch.randint(0, ODD.vocab_size, (rows, 16), generator=generator) for _ in range(2))
    return tokens, targets


def _gradient(model: Decoder, tokens: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    model.loss(tokens, targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _parameters(c: DecoderConfig) -> int:
    a_layer = 2 * c.d_model**2 + 2 * c.d_model * c.kv_dim + 3 * c.d_model * c.d_ff
    tables = (1 if c.tie_embeddings else 2) * c.vocab_size * c.d_model
    return tables + c.n_layers * a_layer + (2 * c.n_layers + 1) * c.d_model


def _products(c: DecoderConfig) -> int:
    a_layer = 2 * c.d_model**2 + 2 * c.d_model * c.kv_dim + 3 * c.d_model * c.d_ff
    return c.n_layers * a_layer + c.vocab_size * c.d_model


def _forward(c: DecoderConfig, batch: int, seq: int) -> int:
    return 2 * batch * seq * _products(c) + 4 * batch * seq**2 * c.d_model * c.n_layers


def _six(c: DecoderConfig, batch: int, seq: int) -> float:
    return 6 * batch * seq * _products(c) * (1 + 2 * seq * c.d_model * c.n_layers / _products(c))


def _held(c: DecoderConfig, batch: int, seq: int) -> int:
    d, f, tokens = c.d_model, c.d_ff, batch * seq
    a_layer = 2 * (3 * d + 1) + 4 * d + c.n_heads + 4 * f
    floats = tokens * (c.n_layers * a_layer + 3 * d + 1 + c.vocab_size) + 2 * seq * (d // c.n_heads) + 1
    return 4 * floats + 16 * tokens


def _cross_entropy(rows: int) -> float:
    tokens, targets = _batch(rows)
    logits = Decoder(ODD)(tokens).detach().double()
    total = 0.0
    for row in range(rows):
        for place in range(tokens.shape[1]):
            scores = logits[row, place]
            total -= float(scores[targets[row, place]] - scores.exp().sum().log())
    return total / tokens.numel()


def _weighted_mean(sizes: tuple[int, ...]) -> Tensor:
    model, (tokens, targets) = Decoder(ODD), _batch(sum(sizes))
    cut = zip(tokens.split(list(sizes)), targets.split(list(sizes)), strict=True)
    parts = [_gradient(model, x, y) for x, y in cut]
    return sum((n * g for n, g in zip(sizes, parts, strict=True)), torch.zeros_like(parts[0])) / sum(sizes)


def _adamw(steps: int, lr: float, decay: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(5, generator=generator, dtype=torch.float64)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, steps + 1):
        g = torch.randn(5, generator=generator, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w - lr * decay * w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    return w


def _torch_adamw(steps: int, lr: float, decay: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.AdamW([w], lr=lr, weight_decay=decay, betas=(0.9, 0.95))
    for _ in range(steps):
        w.grad = torch.randn(5, generator=generator, dtype=torch.float64)
        optimizer.step()
    return w.detach()


EQUATIONS = (
    Equation(
        label="loss",
        latex=r"\ell = -\frac{1}{BS} \sum_{b=1}^{B} \sum_{s=1}^{S} \log \frac{e^{z_{bs,y_{bs}}}}{\sum_{v} e^{z_{bsv}}}",
        implemented_by="dist_lib.models.Decoder.loss",
        evaluate=_cross_entropy,
        library=lambda rows: float(Decoder(ODD).loss(*_batch(rows)).detach()),
        samples=[(1,), (3,)],
        rtol=1e-5,
    ),
    Equation(
        label="adamw",
        latex=(
            r"\begin{aligned} m_t &= \beta_1 m_{t-1} + (1-\beta_1)\, g_t, \qquad"
            r" v_t = \beta_2 v_{t-1} + (1-\beta_2)\, g_t^2, \\"
            r" w_{t} &= w_{t-1} - \eta \lambda\, w_{t-1} - \eta\,"
            r" \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon} \end{aligned}"
        ),
        implemented_by="torch.optim.AdamW",
        evaluate=_adamw,
        library=_torch_adamw,
        samples=[(1, 0.1, 0.0), (7, 0.01, 0.1)],
        rtol=1e-9,
    ),
    Equation(
        label="parameters",
        latex=r"N = (1 + u)\, V D + L \left(2 D^2 + 2 D K E + 3 D F\right) + (2 L + 1)\, D",
        implemented_by="dist_lib.models.parameter_counts",
        evaluate=_parameters,
        library=lambda c: parameter_counts(c).total,
        samples=[(c,) for c in (ODD, *NAMED)],
        rtol=0.0,
    ),
    Equation(
        label="products",
        latex=r"N_{\times} = L \left(2 D^2 + 2 D K E + 3 D F\right) + V D",
        implemented_by="dist_lib.models.parameter_counts",
        evaluate=_products,
        library=lambda c: parameter_counts(c).matrices + parameter_counts(c).embedding,
        samples=[(c,) for c in (ODD, *NAMED)],
        rtol=0.0,
    ),
    Equation(
        label="forward",
        latex=r"C_{\text{fwd}} = 2\, B S\, N_{\times} + 4\, B S^2 D L",
        implemented_by="dist_lib.models.training_flops",
        evaluate=_forward,
        library=lambda *a: training_flops(*a).forward,
        samples=SHAPES,
        rtol=0.0,
    ),
    Equation(
        label="total",
        latex=(
            r"C = 3\, C_{\text{fwd}} = 6\, B S\, N_{\times}"
            r" \left(1 + \frac{2 S D L}{N_{\times}}\right)"
        ),
        implemented_by="dist_lib.models.training_flops",
        evaluate=_six,
        library=lambda *a: training_flops(*a).total,
        samples=SHAPES,
        rtol=1e-12,
    ),
    Equation(
        label="state",
        latex=(
            r"M_{\text{state}} = \underbrace{4N}_{\text{weights}} + \underbrace{4N}_{\text{gradients}}"
            r" + \underbrace{4N + 4N}_{\text{two moments}} = 16\, N"
        ),
        implemented_by="dist_lib.models.training_bytes",
        evaluate=lambda c: 16 * _parameters(c),
        library=lambda c: (lambda b: b.weights + b.gradients + b.optimizer)(training_bytes(c, 1, 1)),
        samples=[(c,) for c in (ODD, *NAMED)],
        rtol=0.0,
    ),
    Equation(
        label="held",
        latex=(
            r"M_{\text{held}} = 4 \left[ BS \left( L\,(10 D + 4 F + H + 2) + 3 D + 1 + V \right) + 2 S E + 1 \right]"
            r" + 16\, BS"
        ),
        implemented_by="dist_lib.models.activation_bytes",
        evaluate=_held,
        library=activation_bytes,
        samples=SHAPES,
        rtol=0.0,
    ),
    Equation(
        label="weighted-mean",
        latex=r"g = \frac{1}{n} \sum_{r=1}^{R} n_r\, g_r, \qquad n = \sum_{r=1}^{R} n_r",
        implemented_by="dist_lib.models.Decoder.loss",
        evaluate=_weighted_mean,
        library=lambda sizes: _gradient(Decoder(ODD), *_batch(sum(sizes))),
        samples=[((2, 2),), ((5, 1, 2),)],
        rtol=1e-5,
    ),
    Equation(
        label="wire",
        latex=r"w_{\text{all-reduce}} = \frac{2 (R-1)}{R}\, M",
        implemented_by="dist_lib.comm.NetworkModel.wire_bytes",
        evaluate=lambda payload, ranks: 2 * (ranks - 1) * payload / ranks,
        library=lambda payload, ranks: float(NetworkModel.wire_bytes("all_reduce", payload, ranks)),
        samples=[(1200, 1), (1200, 2), (1200, 3), (10**9, 8)],
        rtol=1e-12,
    ),
    Equation(
        label="ring",
        latex=r"t_{\text{all-reduce}} = 2 (R-1)\, \alpha + \frac{2 (R-1)}{R} \frac{M}{\beta}",
        implemented_by="dist_lib.comm.NetworkModel.all_reduce",
        evaluate=lambda alpha, beta, payload, r: 2 * (r - 1) * alpha + 2 * (r - 1) / r * payload / beta,
        library=lambda alpha, beta, payload, r: NetworkModel(alpha, beta).all_reduce(payload, r),
        samples=[(1e-5, 5e10, 4 * 10**9, 8), (1e-3, 1e8, 1, 2), (0.0, 1.0, 7, 5)],
        rtol=1e-12,
    ),
)
