"""What the five exercises must do. Each check stands for a way in which few bits go wrong."""

from collections.abc import Callable
from fractions import Fraction
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_lib.agoq import GradientFormat, wire_bytes
from dist_lib.agoq.bit_plan import held_chunks
from dist_lib.checks import Check
from dist_lib.ops import dequantize, quantize

# pack

MAGNITUDES = (1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)
CODEBOOK = torch.tensor([-1.0, *(-m for m in MAGNITUDES[::-1]), 0.0, *MAGNITUDES])  # 16 entries, ascending
Coded = tuple[Tensor, Tensor]


def _numbers(tokens: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(2 * torch.randn(tokens, 1, generator=generator))
    return torch.randn(tokens, width, generator=generator) * rows


def _round_trip(module: ModuleType, x: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    kept = x.clone()
    packed, scales = module.encode(x, CODEBOOK.clone(), block)
    assert torch.equal(x.nan_to_num(7.0), kept.nan_to_num(7.0)), "the tensor given was changed"
    tokens, width = x.shape
    wanted = (tokens, -(-width // 2)), (tokens, -(-width // block))
    shapes = tuple(packed.shape), tuple(scales.shape)
    assert shapes == wanted, f"({tokens}, {width}) in blocks of {block}: shapes {shapes}, not {wanted}"
    assert packed.dtype == torch.uint8 and scales.dtype == torch.float32, f"{packed.dtype} and {scales.dtype}"
    found = module.decode(packed, scales, CODEBOOK.clone(), block, width)
    assert found.shape == x.shape, f"decoded shape {tuple(found.shape)}, not {tuple(x.shape)}"
    return packed, scales, found


def _nearest(module: ModuleType) -> None:
    for tokens, width, block in ((1, 8, 8), (3, 16, 4), (5, 24, 8)):
        x = _numbers(tokens, width)
        _, scales, found = _round_trip(module, x, block)
        wanted = x.view(tokens, -1, block).abs().amax(2)
        assert torch.equal(scales, wanted), f"the scales of {width} numbers in blocks of {block} are not their maxima"
        shares = x / wanted.repeat_interleave(block, 1)
        nearest = CODEBOOK[(shares[..., None] - CODEBOOK).abs().argmin(-1)]
        off = (found / wanted.repeat_interleave(block, 1) - nearest).abs() > 1e-5
        if off.any():
            i = int(off.flatten().nonzero()[0])
            text = f"{float(shares.flatten()[i]):.4f} of its scale came back as "
            got = float((found / wanted.repeat_interleave(block, 1)).flatten()[i])
            raise AssertionError(f"{text}{got:.4f}; the nearest entry is {float(nearest.flatten()[i]):.4f}")


def _halves(module: ModuleType) -> None:
    codes = torch.tensor([[0x0F, 0xF0, 0x8A]], dtype=torch.uint8)
    found = module.decode(codes, torch.tensor([[2.0, 4.0]]), CODEBOOK.clone(), 4, 5)
    indices = torch.tensor([0, 15, 15, 0, 8])
    wanted = CODEBOOK[indices] * torch.tensor([2.0, 2.0, 2.0, 2.0, 4.0])
    assert torch.allclose(found, wanted[None]), f"bytes 0x0F, 0xF0, 0x8A gave {found.tolist()}, not {wanted.tolist()}"
    packed, _ = module.encode(wanted[None], CODEBOOK.clone(), 4)
    first = [hex(b) for b in packed[0, :2].tolist()]
    assert first == ["0xf", "0xf0"], f"the two bytes of -1, 1, 1, -1 are {first}"


def _tokens(module: ModuleType) -> None:
    for width, block in ((6, 4), (5, 8), (7, 2), (12, 8)):
        x = torch.stack([s * _numbers(1, width, seed)[0] for seed, s in enumerate((1e4, 1e-4, 1e4, 1e-4))])
        _, _, found = _round_trip(module, x, block)
        off = ((found - x).norm(dim=1) / x.norm(dim=1)).tolist()
        assert max(off) < 0.35, (
            f"small tokens beside large ones, width {width}, block {block}: relative errors by token "
            f"{[f'{e:.2f}' for e in off]}"
        )


def _special(module: ModuleType) -> None:
    x = _numbers(3, 8)
    x[1] = 0.0
    x[2, ::2] = 0.0
    _, _, found = _round_trip(module, x, 4)
    zeros = found[x == 0]
    assert bool((zeros == 0).all()), f"zeros came back as {zeros.tolist()}"
    x[0, 1] = float("nan")
    _, _, found = _round_trip(module, x, 4)
    assert bool(found[0, 1].isnan()), f"a NaN came back as {float(found[0, 1])}"
    assert bool(found[0, 4:].isfinite().all() and found[1:].isfinite().all()), "a NaN reached other blocks than its own"


# swiglu


class _Counting:
    """A decode function that counts its calls."""

    def __init__(self, decode: Callable[[object], Tensor]) -> None:
        self.decode, self.calls = decode, list[int]()

    def __call__(self, kept: object) -> Tensor:
        self.calls.append(id(kept))
        return self.decode(kept)


def _case(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((6, 5), (6, 12), (6, 12), (5, 12))
    grad, gate, up, weight = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    return grad, scale * gate, up, weight


def _reference(grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in (gate, up, weight)]
    return torch.autograd.grad(F.linear(F.silu(leaves[0]) * leaves[1], leaves[2]), leaves, grad)


def _compare(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], what: str, rtol: float) -> None:
    for name, ours, theirs in zip(("gate", "up", "weight"), found, wanted, strict=True):
        assert ours.shape == theirs.shape, f"{what}: the gradient of {name} is {tuple(ours.shape)}"
        assert bool(ours.isfinite().all()), f"{what}: the gradient of {name} is not finite everywhere"
        off = float((ours - theirs).norm() / theirs.norm())
        assert off < rtol, f"{what}: the gradient of {name} is off by {off:.2g} of its size"


def _autograd(module: ModuleType) -> None:
    grad, gate, up, weight = _case(torch.float64)
    found = module.backward(grad, gate, up, weight, lambda t: t.clone())
    _compare(found, _reference(grad, gate, up, weight), "nothing lost", 1e-10)


def _from_codes(module: ModuleType) -> None:
    grad, gate, up, weight = _case(torch.float32)
    kept = [quantize(t, "fp4", 32) for t in (gate, up)]
    counting = _Counting(dequantize)  # type: ignore[arg-type]
    found = module.backward(grad, *kept, weight, counting)
    _compare(found, _reference(grad, *(dequantize(q) for q in kept), weight), "from 4-bit codes", 1e-4)
    assert sorted(counting.calls) == sorted(map(id, kept)), f"decode was called {len(counting.calls)} times, not twice"


def _large(module: ModuleType) -> None:
    grad, gate, up, weight = _case(torch.float32, scale=200.0)
    found = module.backward(grad, gate, up, weight, lambda t: t.clone())
    _compare(found, _reference(grad, gate, up, weight), "gates of some hundreds", 1e-4)


# wire


def _wire(module: ModuleType, cases: list[tuple[int, int, int]]) -> None:
    for numel, ranks, block in cases:
        wanted = wire_bytes("all_reduce", numel, ranks, GradientFormat("int8", block)).sent
        found = module.sent(numel, ranks, block)
        assert isinstance(found, int), f"bytes are a whole number, not {type(found).__name__}"
        assert found == wanted, f"{numel} numbers, {ranks} ranks, blocks of {block}: {found} bytes, not {wanted}"


def _even(module: ModuleType) -> None:
    _wire(module, [(2**20, 2, 256), (2**20, 4, 256), (2**20, 8, 128), (4096, 2, 32)])


def _uneven(module: ModuleType) -> None:
    sizes = (1, 5, 255, 257, 1000, 12_345)
    _wire(module, [(n, w, b) for n in sizes for w in (2, 3, 4, 7) for b in (32, 256)])


def _nothing(module: ModuleType) -> None:
    _wire(module, [(1000, 1, 256), (0, 4, 256), (0, 1, 32)])


# wrap


def _wraps(module: ModuleType) -> None:
    rows = [[100, 100, -128, -1, 127, -100, 3], [27, 100, 0, -127, 1, -29, 4], [0, -100, 0, 0, -1, 1, 5]]
    codes = torch.tensor(rows, dtype=torch.int8)
    found = module.wrapped(codes).tolist()
    wanted = [False, False, False, False, False, False, False]
    assert found == wanted, f"sums {codes.int().sum(0).tolist()} all fit into int8; reported was {found}"
    codes = torch.tensor([[100, -100, 64, -128, 127], [28, -29, 64, -128, 127]], dtype=torch.int8)
    found = module.wrapped(codes).tolist()
    assert found == [True] * 5, f"sums {codes.int().sum(0).tolist()} do not fit into int8; reported was {found}"
    many = torch.full((4, 3), 64, dtype=torch.int8)
    assert module.wrapped(many).tolist() == [True] * 3, "four times 64 is 256, of which int8 keeps 0"
    codes = torch.randint(-128, 128, (5, 400), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    eight = codes[0].clone()
    for row in codes[1:]:
        eight += row
    assert torch.equal(module.wrapped(codes), eight.int() != codes.int().sum(0)), "random codes of five ranks"


def _add(module: ModuleType, state: Coded, gradient: Tensor, block: int) -> Coded:
    codes, scales = state
    kept = codes.clone(), scales.clone()
    new_codes, new_scales = module.accumulate(codes, scales, gradient, block)
    same = torch.equal(codes, kept[0]) and torch.equal(scales.nan_to_num(7.0), kept[1].nan_to_num(7.0))
    assert same, "codes or scales that were given have been changed"
    assert new_codes.dtype == torch.int8 and new_scales.dtype == torch.float32, f"{new_codes.dtype}, {new_scales.dtype}"
    assert new_codes.shape == codes.shape and new_scales.shape == scales.shape, "codes or scales have another shape"
    return new_codes, new_scales


def _zero(n: int, block: int) -> Coded:
    return torch.zeros(n, dtype=torch.int8), torch.zeros(n // block)


def _decode(state: Coded, block: int) -> Tensor:
    return state[0].float() * state[1].repeat_interleave(block) / 127


def _sum_follows(module: ModuleType) -> None:
    block, generator = 16, torch.Generator().manual_seed(2)
    first = torch.randn(64, generator=generator)
    for terms, what in (
        ([first], "one gradient"),
        ([first] * 6, "six times the same gradient, six times its first range"),
        ([first, -0.99 * first], "two gradients that nearly cancel: a hundredth of the first range is left"),
        ([first, 1e-3 * first, 1e3 * first], "gradients of very different size"),
    ):
        state = _zero(64, block)
        bound = torch.zeros(4)
        for term in terms:
            state = _add(module, state, term, block)
            bound += _exact_bound(state)
        total = torch.stack(terms).sum(0)
        off = (_decode(state, block) - total).abs().view(4, block).amax(1)
        assert bool((off <= bound * 1.01 + 1e-6).all()), f"{what}: off by up to {float((off / bound).max()):.1f} bounds"
        close = torch.allclose(state[1], _decode(state, block).view(4, block).abs().amax(1), rtol=1e-4, atol=1e-12)
        assert close, f"{what}: the scale is not the largest magnitude of the sum"


def _exact_bound(state: Coded) -> Tensor:
    """Half a step of each block."""
    return state[1] / 254


def _error_grows_slowly(module: ModuleType) -> None:
    block, generator = 64, torch.Generator().manual_seed(3)
    state, total = _zero(4096, block), torch.zeros(4096)
    for _ in range(64):
        g = torch.randn(4096, generator=generator)
        state, total = _add(module, state, g, block), total + g
    off = float((_decode(state, block) - total).norm() / total.norm())
    assert off < 0.045, f"64 micro-batches of noise: relative error {off:.3f}; rounding to nearest gives about 0.03"


def _special_sums(module: ModuleType) -> None:
    state = _add(module, _zero(32, 16), torch.zeros(32), 16)
    assert bool((state[0] == 0).all() and (state[1] == 0).all()), f"a sum of zeros has codes or scales: {state}"
    gradient = torch.ones(32)
    gradient[3] = float("nan")
    state = _add(module, state, gradient, 16)
    found = _decode(state, 16)
    assert bool(found[3].isnan()), f"a NaN became {float(found[3])}"
    assert bool(found[16:].isfinite().all()), "a NaN reached another block"
    again = _decode(_add(module, state, torch.ones(32), 16), 16)
    assert bool(again[3].isnan()), "the NaN of an earlier micro-batch is gone"


# stages

WIDTHS = (4, 5, 6, 8, 16)


def _counts(module: ModuleType) -> None:
    for stages in range(1, 9):
        for micro_batches in (1, 2, 4, 8, 20):
            wanted = [max(sum(held) for held in held_chunks(s, stages, micro_batches)) for s in range(stages)]
            found = list(module.in_flight(stages, micro_batches))
            assert found == wanted, f"{stages} stages, {micro_batches} micro-batches: {found}; a walk holds {wanted}"


def _budget(module: ModuleType) -> None:
    sizes = ((Fraction(5), Fraction(11)), (Fraction(4), Fraction(21, 2)), (Fraction(9, 4), Fraction(67, 8)))
    for counts in ([11, 9, 7, 5], [4, 3, 2, 1], [8, 8, 7, 6, 5, 4, 3, 2], [3]):
        for fixed, coded in sizes:
            found = list(module.bits(counts, fixed, coded, WIDTHS))
            budget = counts[0] * (fixed + coded / 4)
            shown = f"counts {counts}, {fixed} U fixed and {coded} U encoded: bits {found}"
            assert len(found) == len(counts) and set(found) <= set(WIDTHS), f"{shown}; allowed are {WIDTHS}"
            for stage, (n, b) in enumerate(zip(counts, found, strict=True)):
                held = n * (fixed + coded * b / 16)
                assert held <= budget, f"{shown}: stage {stage} holds {float(held):.2f} of {float(budget):.2f} U"
                more = [w for w in WIDTHS if w > b and n * (fixed + coded * w / 16) <= budget]
                assert not more, f"{shown}: stage {stage} could have {more[-1]} bits"


def _exact_fit(module: ModuleType) -> None:
    found = list(module.bits([2, 1], Fraction(0), Fraction(3), (4, 8, 16)))
    assert found == [4, 8], f"nothing fixed, half as many in flight: exactly twice the bits fit; got {found}"
    found = list(module.bits([3, 3], Fraction(1, 3), Fraction(1, 3), (5, 6)))
    assert found == [5, 5], f"two stages that hold as many: {found}"


CHECKS = {
    "pack": [
        Check("the nearest entry, in whole blocks", _nearest, "bucketize at the middles between entries"),
        Check("two codes in a byte", _halves, "shift by 4, or multiply by 16"),
        Check(
            "no block spans two tokens", _tokens, "cut each row by itself; a short last block is not filled from below"
        ),
        Check("zeros and NaNs", _special, "what is 0 / 0, and what does a maximum make of a NaN?"),
    ],
    "swiglu": [
        Check("equal to autograd when nothing is lost", _autograd, "d silu / dv = s + v s (1 - s)"),
        Check(
            "from codes, each decoded once", _from_codes, "rebuild the product that the weight saw from decoded numbers"
        ),
        Check("large gates", _large, "exp of some hundreds is infinite; torch.sigmoid is not"),
    ],
    "wire": [
        Check("shards of whole blocks", _even, "2 (ranks - 1) messages of scales and codes"),
        Check("sizes that do not fit", _uneven, "round up: shards, blocks of a shard, words of a message"),
        Check("nothing to send", _nothing, "one rank, or no numbers"),
    ],
    "wrap": [
        Check("where int8 wraps around", _wraps, "compare with the sum in int32; only the end counts"),
        Check("the scale follows the sum", _sum_follows, "decode, add, take the maximum anew"),
        Check("64 micro-batches", _error_grows_slowly, "which way does a cast to int8 round?"),
        Check("zeros and NaNs", _special_sums, "what do max and nan_to_num do with a NaN?"),
    ],
    "stages": [
        Check("in flight", _counts, "the first stage waits longest, and nobody holds more than there are"),
        Check("as many bits as fit", _budget, "put the whole of a stage into the budget, what is fixed included"),
        Check("exactly full is not too full", _exact_fit, "compare fractions, not floats"),
    ],
}
