"""Products whose result is symmetric: ``X X^T`` and polynomials of a symmetric matrix.

Registered with ``torch.library``: the CPU kernel is plain torch and the definition; on CUDA, a Triton kernel computes
one triangle and mirrors it where that wins.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dist_lib::symmetric_matmul", mutates_args=())
def symmetric_matmul(x: Tensor) -> Tensor:
    """``x @ x.mT`` for (b, m, n): (b, m, m), dtype kept."""
    return torch.bmm(x, x.mT)


@symmetric_matmul.register_fake
def _(x: Tensor) -> Tensor:
    torch._check(x.ndim == 3, lambda: f"x has {x.ndim} dimensions, need (b, m, n)")
    return x.new_empty(x.shape[0], x.shape[1], x.shape[1])


@torch.library.custom_op("dist_lib::symmetric_polynomial", mutates_args=())
def polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """``a I + b G + c G^2`` for symmetric G (b, m, m), dtype kept."""
    out = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    if a:
        out.diagonal(dim1=1, dim2=2).add_(a)
    return out


@polynomial.register_fake
def _(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    torch._check(
        gram.ndim == 3 and gram.shape[1] == gram.shape[2], lambda: f"shape {tuple(gram.shape)}, need (b, m, m)"
    )
    return torch.empty_like(gram)
