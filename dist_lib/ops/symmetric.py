"""Products whose result is symmetric: ``X X^T`` and polynomials of a symmetric matrix.

Registered with ``torch.library``, so that ``torch.compile`` and fake tensors see one operator. Plain torch is the
definition and serves every device; on CUDA a Triton kernel computes one triangle and mirrors it where that wins.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

# Below this short edge cuBLAS computes the whole product faster than the Triton kernel computes half of it: DMuon's
# authors measured 0.5 to 0.83 of its speed at 1024 and 1.19 to 1.69 from 2048 on (A800; their repository).
TRITON_FROM = 2048


def _use_triton(x: Tensor) -> bool:
    return x.is_cuda and x.shape[1] >= TRITON_FROM and importlib.util.find_spec("triton") is not None


@torch.library.custom_op("dist_lib::symmetric_matmul", mutates_args=())
def symmetric_matmul(x: Tensor) -> Tensor:
    """``x @ x.mT`` for (b, m, n): (b, m, m), dtype kept."""
    if _use_triton(x):
        from dist_lib.kernels.symmetric_matmul import launch

        return launch(x)
    return torch.bmm(x, x.mT)


@symmetric_matmul.register_fake
def _(x: Tensor) -> Tensor:
    torch._check(x.ndim == 3, lambda: f"x has {x.ndim} dimensions, need (b, m, n)")
    return x.new_empty(x.shape[0], x.shape[1], x.shape[1])


@torch.library.custom_op("dist_lib::symmetric_polynomial", mutates_args=())
def polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """``a I + b G + c G^2`` for symmetric G (b, m, m), dtype kept."""
    if _use_triton(gram):
        from dist_lib.kernels.symmetric_matmul import launch

        return launch(gram, gram, alpha=c, beta=b, diagonal=a)
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
