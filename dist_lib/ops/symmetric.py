"""Products whose result is symmetric: ``X X^T``, polynomials of a symmetric matrix, products of such polynomials.

Registered with ``torch.library``, so that ``torch.compile`` and fake tensors see one operator. Plain torch is the
definition and serves every device; on CUDA a Triton kernel computes one triangle and mirrors it where that wins.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

# Below this short edge cuBLAS computes the whole product faster than the Triton kernel computes half of it: DMuon's
# authors measured 0.5 to 0.83 of its speed at 1024 and 1.19 to 1.69 from 2048 on (A800; their repository).
TRITON_FROM = 2048


@lru_cache(maxsize=32)
def _able(index: int) -> bool:
    """Whether Triton is there and this GPU has the tensor cores that the kernel is compiled for (sm_80 and later)."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)


def uses_kernel(x: Tensor) -> bool:
    """Whether the symmetric products of ``x`` (batch, m, n) run on the Triton kernel.

    Half precision only: Triton multiplies float32 without tensor cores if it may not round to TF32, and it would
    accumulate float64 in float32.
    """
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.is_cuda and half and x.shape[1] >= TRITON_FROM and _able(x.get_device())


def _launch(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diagonal: float) -> Tensor:
    from dist_lib.kernels.symmetric_matmul import launch

    with torch.cuda.device_of(a):
        return launch(a, b, c, alpha=alpha, beta=beta, diagonal=diagonal)


def _need_square(*tensors: Tensor) -> None:
    shape = tensors[0].shape
    ok = len(shape) == 3 and shape[1] == shape[2] and all(t.shape == shape for t in tensors)
    torch._check(ok, lambda: f"shapes {[tuple(t.shape) for t in tensors]}: need equal ones, (batch, m, m)")


def add_to_diagonal(x: Tensor, a: float) -> Tensor:
    """Add ``a`` to the diagonals of (batch, m, m), in place; returns ``x``.

    In float32 and rounded once: on a CPU a half-precision sum with a number rounds the number first, which is the same
    error on the whole diagonal, and it tripled the error of the Gram form.
    """
    diagonal = x.diagonal(dim1=1, dim2=2)
    diagonal.copy_(diagonal.to(torch.promote_types(x.dtype, torch.float32)) + a)
    return x


@torch.library.custom_op("dist_lib::symmetric_matmul", mutates_args=())
def symmetric_matmul(x: Tensor) -> Tensor:
    """``x @ x.mT`` for (batch, m, n): (batch, m, m), dtype kept."""
    torch._check(x.ndim == 3, lambda: f"x has {x.ndim} dimensions, need (batch, m, n)")
    return _launch(x, x, None, 1.0, 0.0, 0.0) if uses_kernel(x) else torch.bmm(x, x.mT)


@symmetric_matmul.register_fake
def _(x: Tensor) -> Tensor:
    torch._check(x.ndim == 3, lambda: f"x has {x.ndim} dimensions, need (batch, m, n)")
    return x.new_empty(x.shape[0], x.shape[1], x.shape[1])


@torch.library.custom_op("dist_lib::symmetric_polynomial", mutates_args=())
def polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """``a I + b G + c G^2`` for symmetric G (batch, m, m), dtype kept."""
    _need_square(gram)
    if uses_kernel(gram):
        return _launch(gram, gram, gram, c, b, a)
    out = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return add_to_diagonal(out, a) if a else out


@polynomial.register_fake
def _(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    _need_square(gram)
    return gram.new_empty(gram.shape)


@torch.library.custom_op("dist_lib::symmetric_product", mutates_args=())
def commuting_product(left: Tensor, right: Tensor, added: Tensor, beta: float) -> Tensor:
    """``left @ right + beta added`` for three symmetric (batch, m, m) of which the first two commute, dtype kept.

    Polynomials of one symmetric matrix commute, and their product is symmetric. The kernel relies on both; plain torch
    computes the product of any two matrices.
    """
    _need_square(left, right, added)
    if uses_kernel(left):
        return _launch(left, right, added, 1.0, beta, 0.0)
    return torch.baddbmm(added, left, right, beta=beta)


@commuting_product.register_fake
def _(left: Tensor, right: Tensor, added: Tensor, beta: float) -> Tensor:
    _need_square(left, right, added)
    return left.new_empty(left.shape)
