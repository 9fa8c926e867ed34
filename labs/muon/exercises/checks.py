"""What the five exercises must do. Each check stands for a fault that was published somewhere."""

from types import ModuleType

import torch
from torch import Tensor

from dist_lib.checks import Check
from dist_lib.ops import newton_schulz, polar_express

KELLER = (3.4445, -4.7750, 2.0315)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _polar(x: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    return (u @ vt).to(x.dtype)


def _apart(found: Tensor, expected: Tensor) -> float:
    assert isinstance(found, Tensor), f"expected a tensor, got {type(found).__name__}"
    assert found.shape == expected.shape, f"the shape is {tuple(found.shape)}, it must be {tuple(expected.shape)}"
    assert torch.isfinite(found).all(), "the result holds NaN or infinity"
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


# momentum


def _run_momentum(module: ModuleType, nesterov: bool, after: bool) -> tuple[Tensor, Tensor]:
    """Three steps; returns the buffer and its recurrence. ``after``: the caller normalises the direction in place."""
    buffer, expected = torch.zeros(4, 6), torch.zeros(4, 6)
    for step in range(3):
        grad = _randn(4, 6, seed=step)
        given = grad.clone()
        direction = module.momentum_step(buffer, given, 0.9, nesterov)
        expected = 0.9 * expected + grad
        wanted = grad + 0.9 * expected if nesterov else expected
        error = _apart(direction, wanted)
        assert error < 1e-5, f"the direction of step {step} (nesterov={nesterov}) is off by {error:.1%}"
        if after:
            direction.div_(direction.norm())
            assert torch.equal(given, grad), "the gradient changed"
    return buffer, expected


def _direction(module: ModuleType) -> None:
    for nesterov in (True, False):
        _run_momentum(module, nesterov, after=False)


def _buffer(module: ModuleType) -> None:
    for nesterov in (True, False):
        buffer, expected = _run_momentum(module, nesterov, after=True)
        error = _apart(buffer, expected)
        assert error < 1e-5, f"after three steps (nesterov={nesterov}) the buffer is off by {error:.1%}"


# normalise


def _ordinary(module: ModuleType) -> None:
    for x in (_randn(5, 8), _randn(8, 5), torch.eye(3)):
        kept = x.clone()
        error = _apart(module.normalise(x), kept / kept.norm())
        assert error < 1e-5, f"off by {error:.1%}"
        assert torch.equal(x, kept), "the matrix given was changed"


def _any_scale(module: ModuleType) -> None:
    x = _randn(5, 8)
    for size in (1e-30, 1e-15, 1e-7, 1e15, 1e30):
        found = module.normalise(x * size)
        error = _apart(found, x / x.norm())
        assert error < 1e-4, f"entries of size {size:g}: norm {float(found.norm()):.3g}, off by {error:.1%}"


def _zero(module: ModuleType) -> None:
    found = module.normalise(torch.zeros(3, 4))
    assert torch.equal(found, torch.zeros(3, 4)), f"zero became {found.flatten()[0].item()}"


def _half(module: ModuleType) -> None:
    x = (_randn(16, 32).clamp(-1, 1) * 6e4).half()
    found = module.normalise(x)
    assert found.dtype == torch.float32, f"the dtype is {found.dtype}, it must be torch.float32"
    error = _apart(found, x.double() / x.double().norm())
    assert error < 1e-4, f"float16 entries up to 6e4: off by {error:.1%}"


# gram


def _wide(spread: float, rows: int = 32, cols: int = 96) -> Tensor:
    """Norm 1, singular values from 1 down to ``spread`` before normalising."""
    u, _, vt = torch.linalg.svd(_randn(rows, cols).double(), full_matrices=False)
    x = (u * torch.logspace(0, torch.tensor(spread).log10().item(), rows, dtype=torch.float64)) @ vt
    return (x / x.norm()).float()


def _reference(x: Tensor, triples: list[tuple[float, float, float]]) -> Tensor:
    x = x.double()
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _same_matrix(module: ModuleType) -> None:
    x = _wide(0.05)
    for steps in (1, 2, 3, 5):
        for restarts in (set(), {2}, {0, 1, 3}):
            triples = [*polar_express(5)][:steps]
            kept = x.clone()
            error = _apart(module.gram_newton_schulz(x, triples, restarts), _reference(x, triples))
            assert error < 1e-3, f"{steps} steps, restarts {restarts or 'none'}: off by {error:.2%}"
            assert torch.equal(x, kept), "the matrix given was changed"


def _restart_matters(module: ModuleType) -> None:
    x, triples = _wide(1e-6, 48, 48), list(polar_express(5))
    found = module.gram_newton_schulz(x.half(), triples, {2})
    assert found.dtype == torch.float16, f"products must be in float16, got {found.dtype}"
    assert torch.isfinite(found).all(), "float16 overflowed"
    error = _apart(found, _reference(x, triples))
    assert error < 0.35, f"float16, singular values down to 1e-6, restart at 2: off by {error:.0%}"


# shards


class _Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        assert x.ndim == 2, f"orthogonalise takes one matrix, it got shape {tuple(x.shape)}"
        self.calls += 1
        return _polar(x)


def _equals_whole(module: ModuleType, rows: list[int], cols: int) -> None:
    whole, polar = _randn(sum(rows), cols), _Counted()
    shards = [s.clone() for s in whole.split(rows)]
    found = module.sharded_update(shards, polar)
    assert [tuple(f.shape) for f in found] == [(r, cols) for r in rows], (
        f"the shapes are {[tuple(f.shape) for f in found]}"
    )
    error = _apart(torch.cat(list(found)), _polar(whole) * 0.2 * max(sum(rows), cols) ** 0.5)
    assert error < 1e-4, f"shards of {rows} rows: the stacked update is off by {error:.0%}"
    assert polar.calls == 1, f"orthogonalise was called {polar.calls} times"


def _even(module: ModuleType) -> None:
    _equals_whole(module, [4, 4], 12)
    _equals_whole(module, [8, 8, 8], 5)


def _uneven(module: ModuleType) -> None:
    _equals_whole(module, [2, 2, 2, 1], 10)
    _equals_whole(module, [3, 0, 1], 6)


# scale


def _each_block(module: ModuleType) -> None:
    for sizes, cols in (([8, 4, 4], 10), ([6, 30], 12), ([5], 5)):
        momentum = _randn(sum(sizes), cols)
        kept = momentum.clone()
        found = module.fused_update(momentum, list(sizes), _polar, 0.2)
        assert torch.equal(momentum, kept), "the momentum was changed"
        assert found.shape == momentum.shape, f"the shape is {tuple(found.shape)}"
        for index, (block, source) in enumerate(zip(found.split(sizes), kept.split(sizes), strict=True)):
            rms = float(block.double().square().mean().sqrt())
            assert abs(rms - 0.2) < 1e-3, f"block {index} of {sizes} x {cols} has root mean square {rms:.3f}, not 0.2"
            error = _apart(block / block.norm(), _polar(source) / _polar(source).norm())
            assert error < 1e-3, f"block {index} of {sizes} x {cols} points elsewhere, by {error:.0%}"


def _orthogonal_by_newton_schulz(module: ModuleType) -> None:
    momentum = _randn(48, 32)
    found = module.fused_update(momentum, [32, 16], lambda x: newton_schulz(x[None])[0], 0.1)
    rms = float(found.square().mean().sqrt())
    assert 0.08 < rms < 0.12, f"with Newton-Schulz the root mean square is {rms:.3f}, not about 0.1"


CHECKS = {
    "momentum": [
        Check("the direction of each step", _direction, "Nesterov uses the buffer after it has been advanced"),
        Check("buffer and gradient survive the caller", _buffer, "does what you return share memory with the buffer?"),
    ],
    "normalise": [
        Check("an ordinary matrix", _ordinary, "which of your operations ends in an underscore?"),
        Check("any scale gives the same direction", _any_scale, "the square of 1e-30 is 0 in float32: what first?"),
        Check("zero stays zero", _zero, "what is 0 / 0?"),
        Check("half precision does not overflow", _half, "the largest float16 is 65504: which dtype comes first?"),
    ],
    "gram": [
        Check("the same matrix as the direct form", _same_matrix, "G becomes P G P, Q becomes P Q"),
        Check("float16 survives with a restart", _restart_matters, "after folding Q into X, compute G from the new X"),
    ],
    "shards": [
        Check("even shards", _even, "the whole matrix must be in one place; whose shape decides the scale?"),
        Check("uneven and empty shards", _uneven, "cut the result as the momentum was cut"),
    ],
    "scale": [
        Check("every block has the target size", _each_block, "the norm is sqrt(min(m, n)); the elements are m n"),
        Check("with Newton-Schulz too", _orthogonal_by_newton_schulz, "one factor a block, from its own shape"),
    ],
}
