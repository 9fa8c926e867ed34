"""Triton kernel: a product that is known to be symmetric, one triangle computed and mirrored.

``OUT = alpha A B^T + beta C + diagonal I`` for a batch of matrices, with ``A B^T`` and C symmetric. With A = B = X it
is the Gram matrix; with A = B = C = G, for symmetric G, the polynomial ``a I + b G + c G^2``; with A and B polynomials
of one symmetric matrix their product. One program computes one tile on or below the diagonal and stores it twice, the
second time transposed; inside a diagonal tile the lower half is mirrored too, so the result is symmetric bit for bit.
Accumulation in float32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def symmetric_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    out_ptr,
    m,
    n,
    a_batch,
    a_row,
    b_batch,
    b_row,
    c_batch,
    c_row,
    out_batch,
    out_row,
    alpha,
    beta,
    diagonal,
    HAS_C: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile on or below the diagonal; grid (tiles of the triangle, batch)."""
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    # The tile-th pair (row, col) with row >= col, counted row by row; the square root may be off by one.
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    col = tile - row * (row + 1) // 2
    r = (row * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    c = (col * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    left = a_ptr + batch * a_batch + r[:, None] * a_row + k[None, :]
    right = b_ptr + batch * b_batch + c[:, None] * b_row + k[None, :]
    acc = tl.full((BLOCK_M, BLOCK_M), 0.0, dtype=tl.float32)
    for start in range(0, n, BLOCK_K):
        keep = k[None, :] < n - start
        x = tl.load(left, mask=(r[:, None] < m) & keep, other=0.0)
        y = tl.load(right, mask=(c[:, None] < m) & keep, other=0.0)
        if UPCAST:  # the interpreter multiplies bfloat16 as raw bits
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K
    acc = acc * alpha
    inside = (r[:, None] < m) & (c[None, :] < m)
    if HAS_C:
        old = tl.load(c_ptr + batch * c_batch + r[:, None] * c_row + c[None, :], mask=inside, other=0.0)
        acc += beta * old.to(tl.float32)
    acc += tl.where(r[:, None] == c[None, :], diagonal, 0.0)
    if row == col:
        acc = tl.where(r[:, None] >= c[None, :], acc, tl.trans(acc))
    out = acc.to(out_ptr.dtype.element_ty)
    base = out_ptr + batch * out_batch
    tl.store(base + r[:, None] * out_row + c[None, :], out, mask=inside)
    if row != col:
        mirrored = (c[:, None] < m) & (r[None, :] < m)
        tl.store(base + c[:, None] * out_row + r[None, :], tl.trans(out), mask=mirrored)


def launch(
    a: torch.Tensor,
    b: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    block_m: int = 128,
    block_k: int = 64,
    interpreted: bool = False,
) -> torch.Tensor:
    """``alpha a b^T + beta c + diagonal I`` for a, b (batch, m, n) and c (batch, m, m); (batch, m, m) in a's dtype.

    Args:
        a: float32, float16 or bfloat16.
        b: as ``a``, such that ``a b^T`` is symmetric (only its lower triangle is computed); None stands for ``a``.
        c: symmetric, or None for zero.
        alpha, beta, diagonal: numbers.
        block_m, block_k: tile; 128 x 64 fits the shared memory of every GPU since sm_80 with three stages in half
            precision.
        interpreted: for tests: run on CPU tensors through Triton's interpreter.
    """
    if a.ndim != 3 or (b is not None and b.shape != a.shape):
        raise ValueError(f"a has shape {tuple(a.shape)}, b {None if b is None else tuple(b.shape)}: need (batch, m, n)")
    if c is not None and c.shape != (a.shape[0], a.shape[1], a.shape[1]):
        raise ValueError(f"c has shape {tuple(c.shape)}, need {(a.shape[0], a.shape[1], a.shape[1])}")
    a = a if a.stride(2) == 1 else a.contiguous()
    b = a if b is None else (b if b.stride(2) == 1 else b.contiguous())
    added = a if c is None else (c if c.stride(2) == 1 else c.contiguous())
    batch, m, n = a.shape
    out = torch.empty(batch, m, m, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    wide = a.element_size() == 4
    if wide:  # a float32 tile takes twice the shared memory
        block_m, block_k = min(block_m, 64), min(block_k, 32)
    tiles = triton.cdiv(m, block_m)
    kernel = symmetric_kernel
    if interpreted:
        from triton.runtime.interpreter import InterpretedFunction

        kernel = InterpretedFunction(symmetric_kernel.fn)
    kernel[(tiles * (tiles + 1) // 2, batch)](
        a,
        b,
        added,
        out,
        m,
        n,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        added.stride(0),
        added.stride(1),
        out.stride(0),
        out.stride(1),
        alpha,
        beta,
        diagonal,
        HAS_C=c is not None,
        UPCAST=interpreted,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4 if wide else 8,
        num_stages=3,
    )
    return out
