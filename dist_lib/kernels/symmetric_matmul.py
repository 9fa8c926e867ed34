"""Triton kernel: a product that is known to be symmetric, one triangle computed and mirrored.

``OUT = alpha A A^T + beta C + diagonal I`` for a batch of matrices, with C symmetric. With A = X it is the Gram
matrix; with A = C = G, for symmetric G, it is the polynomial ``a I + b G + c G^2``. One program computes one tile on or
below the diagonal and stores it twice, the second time transposed; inside a diagonal tile the lower half is mirrored
too, so the result is symmetric bit for bit. Accumulation in float32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def symmetric_kernel(
    a_ptr,
    c_ptr,
    out_ptr,
    m,
    n,
    a_batch,
    a_row,
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
    a_base = a_ptr + batch * a_batch
    left = a_base + r[:, None] * a_row + k[None, :]
    right = a_base + c[:, None] * a_row + k[None, :]
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
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    block_m: int = 128,
    block_k: int = 64,
    interpreted: bool = False,
) -> torch.Tensor:
    """``alpha a a^T + beta c + diagonal I``: a (b, m, n), c (b, m, m) or None; returns (b, m, m) in a's dtype.

    Args:
        a, c: float32, float16 or bfloat16, last dimension contiguous.
        alpha, beta, diagonal: numbers.
        block_m, block_k: tile; 128 x 64 fits the shared memory of every GPU since sm_80 with three stages in half
            precision.
        interpreted: for tests: run on CPU tensors through Triton's interpreter.
    """
    if a.ndim != 3 or (c is not None and c.shape != (a.shape[0], a.shape[1], a.shape[1])):
        raise ValueError(f"a has shape {tuple(a.shape)} and c {None if c is None else tuple(c.shape)}")
    a = a if a.stride(2) == 1 else a.contiguous()
    c = None if c is None else (c if c.stride(2) == 1 else c.contiguous())
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
    source = a if c is None else c
    kernel[(tiles * (tiles + 1) // 2, batch)](
        a,
        source,
        out,
        m,
        n,
        a.stride(0),
        a.stride(1),
        source.stride(0),
        source.stride(1),
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
