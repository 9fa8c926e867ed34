"""Newton-Schulz: the polar factor of a matrix, nearly, by matrix products alone.

The float32 code here is the definition. Two forms give the same matrix in exact arithmetic: the *direct* one applies
each quintic to the wide matrix; the *Gram* one iterates on the small Gram matrix and touches the wide one at the start,
at each restart and at the end. All work is batched, also for one matrix, so that a matrix's bits do not depend on
what it is batched with. On a GPU the symmetric products go through :func:`~dist_lib.ops.symmetric_matmul`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from dist_lib.ops.coefficients import Coefficients, Triple, resolve
from dist_lib.ops.symmetric import add_to_diagonal, commuting_product, polynomial, symmetric_matmul, uses_kernel

Form = Literal["auto", "direct", "gram"]
DEFAULT_RESTARTS = (2,)


def normalise(x: Tensor) -> Tensor:
    """Scale each matrix of (b, m, n) float32 to Frobenius norm 1; zero stays zero.

    Divides by the largest magnitude first, in two factors, so that neither the squares nor the reciprocal over- or
    underflow: the direction is the same for inputs scaled by 1e-30 or 1e30. A NaN or infinity makes its own matrix NaN.
    """
    largest = x.abs().amax(dim=(1, 2), keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-126, 126)
    scaled = torch.ldexp(torch.ldexp(x, -(exponent // 2)), -(exponent - exponent // 2))
    norm = torch.linalg.vector_norm(scaled, dim=(1, 2), keepdim=True)
    return scaled / torch.where(norm == 0, torch.ones_like(norm), norm)


def _padded(x: Tensor) -> Tensor:
    """Zero rows and columns up to whole 64-byte lines. They change no product, and every matrix of a batch starts at
    an aligned address: CPU matrix products differ in the last bit between aligned and unaligned operands."""
    line = 64 // x.element_size()
    m, n = x.shape[1:]
    return torch.nn.functional.pad(x, (0, -n % line, 0, -m % line)).contiguous()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device: str) -> bool:
    """Whether torch knows autocast for a kind of device: a constant that Dynamo of torch 2.11 cannot look up itself."""
    return torch.amp.is_autocast_available(device)


def _no_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would turn the float32 products of the definition into bfloat16 ones."""
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _direct(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    for a, b, c in triples:
        gram = symmetric_matmul(x)
        x = torch.baddbmm(x, polynomial(gram, 0.0, b, c), x, beta=a)
    return x


def _gram(
    x: Tensor,
    triples: Sequence[Triple],
    restarts: Sequence[int],
    gram_of: Callable[[Tensor], Tensor] = symmetric_matmul,
) -> Tensor:
    folds, q = {r for r in restarts if 0 < r < len(triples)}, None
    gram = gram_of(x)
    for step, (a, b, c) in enumerate(triples):
        if step in folds and q is not None:
            x = torch.bmm(q, x)
            gram, q = gram_of(x), None
        z = polynomial(gram, 0.0, b, c)  # P without its multiple of the identity
        q = add_to_diagonal(z.clone(), a) if q is None else commuting_product(q, z, q, a)
        if step + 1 < len(triples) and step + 1 not in folds:
            t = commuting_product(gram, z, gram, a)  # G P
            gram = commuting_product(z, t, t, a)  # P G P
    return x if q is None else torch.bmm(q, x)


def newton_schulz_flops(
    rows: int,
    cols: int,
    *,
    steps: int = 5,
    form: Form = "direct",
    symmetric: bool = False,
    restarts: Sequence[int] = DEFAULT_RESTARTS,
) -> int:
    """FLOPs of the matrix products, one multiply-add counted as two.

    With m = min(rows, cols), n = max(rows, cols) and k steps, the direct form takes ``k (4 m^2 n + 2 m^3)``. The Gram
    form takes, for f folds (restarts that happen), ``(f + 1) (4 m^2 n)`` for Gram matrices and applications, and
    ``2 m^3`` for each of k squares, k - f - 1 products with Q and 2 (k - f - 1) products that advance the Gram matrix.

    Args:
        rows, cols: of one matrix.
        steps: number of quintics.
        form: ``"auto"`` is the cheaper one.
        symmetric: count products with a symmetric result at half (one triangle is computed).
        restarts: steps before which the Gram form starts anew.

    Raises:
        ValueError: sizes or steps below 1, or an unknown form.
    """
    if min(rows, cols, steps) < 1 or form not in ("auto", "direct", "gram"):
        raise ValueError(f"rows {rows}, cols {cols}, steps {steps}, form {form!r}: sizes and steps must be at least 1")
    m, n = min(rows, cols), max(rows, cols)
    half = 1 if symmetric else 2
    direct = steps * (half * m * m * n + half * m**3 + 2 * m * m * n)
    folds = len({r for r in restarts if 0 < r < steps})
    again = steps - folds - 1
    gram = (folds + 1) * (half + 2) * m * m * n + (steps + 3 * again) * half * m**3
    return {"direct": direct, "gram": gram, "auto": min(direct, gram)}[form]


def choose_form(
    rows: int,
    cols: int,
    *,
    steps: int = 5,
    symmetric: bool = False,
    restarts: Sequence[int] = DEFAULT_RESTARTS,
) -> Literal["direct", "gram"]:
    """The form with fewer FLOPs (arguments: see :func:`newton_schulz_flops`); the direct one on a tie."""
    direct = newton_schulz_flops(rows, cols, steps=steps, form="direct", symmetric=symmetric)
    gram = newton_schulz_flops(rows, cols, steps=steps, form="gram", symmetric=symmetric, restarts=restarts)
    return "gram" if gram < direct else "direct"


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "polar_express",
    form: Form = "auto",
    restarts: Sequence[int] = DEFAULT_RESTARTS,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Approximate ``U V^T`` of each matrix ``U S V^T``.

    Args:
        x: (m, n) or (b, m, n), floating; any strides; not changed.
        steps: number of quintics.
        coefficients: a name of :data:`~dist_lib.ops.COEFFICIENTS` or one triple ``(a, b, c)`` for each step.
        form: ``"direct"``, ``"gram"``, or ``"auto"``: the one with fewer FLOPs for this shape.
        restarts: steps before which the Gram form folds back and computes the Gram matrix anew.
        compute_dtype: of the products, after normalising in float32. Default: float32 on a CPU; float16 on a GPU,
            whose values are bounded by the normalisation and which has three more mantissa bits than bfloat16. Half
            precision on a CPU is for study: right, but many times slower than float32 without native instructions.
            ``torch.autocast`` has no effect.

    Returns:
        The same shape and dtype as ``x``. Zero gives zero; a matrix with NaN or infinity gives NaN, alone.

    Raises:
        ValueError: another number of dimensions, or a bad set, form or number of steps.
        TypeError: integer or complex input, or a compute dtype that is none of float64, float32, float16, bfloat16.

    Source: DMuon (arXiv 2606.27153) sections on Newton-Schulz; Gram-NS by Dao-AILab; Keller Jordan's post on Muon.
    """
    if x.ndim not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)}: need a matrix (m, n) or a batch (b, m, n)")
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}: need a real floating type")
    if form not in ("auto", "direct", "gram"):
        raise ValueError(f"form {form!r}: allowed are 'auto', 'direct' and 'gram'")
    triples = resolve(coefficients, steps)
    dtype = compute_dtype or (torch.float16 if x.device.type == "cuda" else torch.float32)
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"compute_dtype {dtype}: allowed are float64, float32, float16 and bfloat16")
    batch = x if x.ndim == 3 else x.unsqueeze(0)
    if batch.numel() == 0:
        return x.clone()
    wide = batch.shape[1] <= batch.shape[2]
    work = batch if wide else batch.transpose(1, 2)
    m, n = work.shape[1:]
    with _no_autocast(x.device.type):
        work = _padded(normalise(work.to(torch.float64 if dtype == torch.float64 else torch.float32)).to(dtype))
        if form == "auto":
            form = choose_form(m, n, steps=steps, symmetric=uses_kernel(work), restarts=restarts)
        out = _direct(work, triples) if form == "direct" else _gram(work, triples, restarts)
    out = out[:, :m, :n]
    out = out if wide else out.transpose(1, 2)
    return out.to(x.dtype).reshape(x.shape).contiguous()


@torch.no_grad()
def newton_schulz_sharded(
    part: Tensor,
    *,
    largest: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
    steps: int = 5,
    coefficients: Coefficients = "polar_express",
    restarts: Sequence[int] = DEFAULT_RESTARTS,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`newton_schulz` of a matrix whose long dimension is cut into parts, one for each of several callers.

    The Gram form needs of the whole matrix only its norm and the sum over parts of ``part part^T``: one number of each
    matrix, and ``m x m`` numbers at the start and at each restart. Everything else is done on the part.

    Args:
        part: (m, n_t), floating: columns of an (m, n) matrix with m at most n; no columns for an empty part.
        largest: elementwise maximum over all parts, of a tensor that each caller gives; called once.
        total: elementwise sum over all parts; called ``2 + restarts`` times, in the same order by all. Its result must
            have the same bits everywhere.
        steps, coefficients, restarts, compute_dtype: see :func:`newton_schulz`.

    Returns:
        The same columns of the orthogonalised matrix, of the dtype of ``part``.

    Raises:
        ValueError: not a matrix.
    """
    if part.ndim != 2:
        raise ValueError(f"part has shape {tuple(part.shape)}: need a matrix (m, n_t)")
    triples = resolve(coefficients, steps)
    dtype = compute_dtype or (torch.float16 if part.device.type == "cuda" else torch.float32)
    x = part.float().unsqueeze(0)
    m, n = part.shape
    with _no_autocast(part.device.type):
        here = x.abs().amax() if n else x.new_zeros(())
        exponent = torch.frexp(largest(here)).exponent.clamp(-126, 126)
        scaled = torch.ldexp(torch.ldexp(x, -(exponent // 2)), -(exponent - exponent // 2))
        norm = total(scaled.square().sum()).sqrt()
        work = _padded((scaled / torch.where(norm == 0, torch.ones_like(norm), norm)).to(dtype))

        def gram_of(y: Tensor) -> Tensor:
            gram: Tensor = symmetric_matmul(y)  # padded: only what is not zero travels
            gram[:, :m, :m] = total(gram[:, :m, :m].float().contiguous()).to(dtype)
            return gram

        out = _gram(work, triples, restarts, gram_of)
    return out[0, :m, :n].to(part.dtype).contiguous()
