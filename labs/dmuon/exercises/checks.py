"""What the four exercises must do. Each check stands for a way in which owner-sharded Muon goes wrong."""

import random
from collections import Counter
from math import ceil
from types import ModuleType

import torch
from torch import Tensor

from dist_lib.checks import Check
from dist_lib.dmuon.workloads import workload
from dist_lib.ops import newton_schulz_flops

# lpt


def _model(name: str) -> dict[str, float]:
    return {m.name: newton_schulz_flops(*m.shape, form="gram", symmetric=True) / 1e9 for m in workload(name)}


def _expected(costs: dict[str, float], ranks: int) -> dict[str, int]:
    loads, owners = [0.0] * ranks, {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        owners[name] = min(range(ranks), key=lambda r: (loads[r], r))
        loads[owners[name]] += costs[name]
    return owners


def _rule(module: ModuleType) -> None:
    cases = [({}, 3), ({"a": 1.0}, 4), ({"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 3.0}, 2)]
    rng = random.Random(0)
    cases += [({f"w{i}": float(rng.randint(0, 40)) for i in range(n)}, r) for n in (2, 7, 30) for r in (1, 2, 3, 8)]
    for costs, ranks in cases:
        found, wanted = dict(module.assign(costs, ranks)), _expected(costs, ranks)
        shown = f"{len(costs)} matrices on {ranks} ranks"
        assert found.keys() == wanted.keys(), f"{shown}: every name needs an owner; got {sorted(found)[:6]}"
        wrong = [n for n in sorted(costs, key=lambda n: (-costs[n], n)) if found[n] != wanted[n]]
        if wrong:
            n = wrong[0]
            raise AssertionError(f"{shown}: {n!r} (cost {costs[n]}) went to rank {found[n]}, not {wanted[n]}")


def _any_order(module: ModuleType) -> None:
    costs = dict(sorted(_model("llama3.2-1b").items()))
    names, first = list(costs), dict(module.assign(costs, 8))
    for seed in range(5):
        random.Random(seed).shuffle(names)
        again = dict(module.assign({n: costs[n] for n in names}, 8))
        assert again == first, "the same matrices listed in another order got other owners: two ranks would disagree"


def _balance(module: ModuleType) -> None:
    costs = _model("qwen2.5-1.5b")
    for ranks in (2, 8, 16):
        loads = [0.0] * ranks
        for name, owner in module.assign(costs, ranks).items():
            loads[owner] += costs[name]
        bound = max(max(costs.values()), sum(costs.values()) / ranks)
        limit = (4 / 3 - 1 / (3 * ranks)) * bound
        assert max(loads) <= limit, f"{ranks} ranks: the fullest has {max(loads) / bound:.2f} times the lower bound"


# payload

SHAPES = [(8, 6), (5, 7), (3, 4), (1, 9), (16, 2)]


def _wanted(shapes: list[tuple[int, int]], ranks: int, mode: str, w: int, g: int, k: int) -> dict[str, int]:
    whole = sum(rows * cols for rows, cols in shapes)
    part = sum(ceil(rows / ranks) * cols for rows, cols in shapes)
    return {
        "replicated": {"gradients all-reduced": whole * g},
        "ddp": {"gradients reduced": whole * g, "weights broadcast": whole * w},
        "fsdp-keep": {"gradients reduced": whole * g, "weights broadcast": k * whole * w},
        "fsdp-free": {"gradients reduced": whole * g, "weights broadcast": 2 * k * whole * w},
        "gather-free": {
            "weights gathered": 2 * k * part * w,
            "gradients scattered": ranks * part * g,
            "gradients gathered": part * g,
        },
    }[mode]


def _grid(module: ModuleType, modes: tuple[str, ...]) -> None:
    for mode in modes:
        for ranks in (1, 2, 3, 4):
            for w, g, k in ((4, 4, 1), (2, 4, 1), (2, 4, 3)):
                parts = _wanted(SHAPES, ranks, mode, w, g, k)
                found = module.step_payload(SHAPES, ranks, mode, weight=w, gradient=g, micro_batches=k)
                assert isinstance(found, int), f"bytes are a whole number, not {type(found).__name__}"
                told = ", ".join(f"{what} {n}" for what, n in parts.items())
                assert found == sum(parts.values()), (
                    f"{mode}, {ranks} ranks, {w} and {g} bytes, {k} micro-batches: {found}, but {told}"
                )


def _owners(module: ModuleType) -> None:
    _grid(module, ("ddp", "fsdp-keep", "fsdp-free"))


def _baselines(module: ModuleType) -> None:
    _grid(module, ("replicated", "gather-free"))


def _real_model(module: ModuleType) -> None:
    shapes = [(m.shape[0], m.shape[1]) for m in workload("qwen2.5-7b")]
    for mode in ("ddp", "fsdp-free", "gather-free"):
        wanted = sum(_wanted(shapes, 8, mode, 2, 4, 1).values())
        found = module.step_payload(shapes, 8, mode, weight=2, gradient=4, micro_batches=1)
        assert found == wanted, f"Qwen2.5-7B, {mode}, 8 ranks: {found / 1e9:.2f} GB instead of {wanted / 1e9:.2f} GB"


# once

OWNERS = {"q": 0, "k": 1, "v": 2, "o": 0, "gate": 1, "up": 0}


def _histograms(maps: list[dict[str, int]]) -> list[Counter[str]]:
    return [Counter(name for name, owner in seen.items() if owner == rank) for rank, seen in enumerate(maps)]


def _broken(module: ModuleType) -> None:
    for owners, ranks in ((OWNERS, 3), ({"a": 0, "b": 0, "c": 1}, 2), ({**OWNERS, "down": 3}, 5)):
        kept = dict(owners)
        maps = [dict(m) for m in module.break_it(owners, ranks)]
        assert owners == kept, "the right map was changed"
        assert len(maps) == ranks, f"{len(maps)} maps for {ranks} ranks"
        for rank, seen in enumerate(maps):
            assert seen.keys() == owners.keys(), f"rank {rank}'s map does not have the names of the right one"
            assert all(0 <= o < ranks for o in seen.values()), f"rank {rank}'s map names a rank that does not exist"
        total = sum(_histograms(maps), Counter[str]())
        counts = {name: total[name] for name in owners}
        assert max(counts.values()) > 1, f"no matrix is updated twice: {counts}"
        assert min(counts.values()) == 0, f"no matrix is forgotten: {counts}"
        assert sum(counts.values()) == len(owners), f"{sum(counts.values())} updates of {len(owners)} matrices"


def _caught(module: ModuleType) -> None:
    names, right = list(OWNERS), _histograms([OWNERS] * 3)
    assert module.not_once(right, names, 1) == {}, "nothing is wrong, and something was reported"
    swapped = [dict(OWNERS) for _ in range(3)]
    swapped[1]["k"], swapped[1]["q"] = 0, 1
    found = dict(module.not_once(_histograms(swapped), names, 1))
    assert found == {"k": 0, "q": 2}, f"'q' was updated twice and 'k' never; reported was {found}"
    found = dict(module.not_once([*right[:2], Counter({"v": 1, "norm": 1})], names, 1))
    assert found == {"norm": 1}, f"'norm' is no matrix, and it was updated; reported was {found}"
    found = dict(module.not_once([Counter(), Counter(), Counter()], names, 1))
    assert found == dict.fromkeys(names, 0), f"Newton-Schulz never ran; reported was {found}"


def _steps(module: ModuleType) -> None:
    histograms = [Counter({n: 7 * c for n, c in h.items()}) for h in _histograms([OWNERS] * 3)]
    assert module.not_once(histograms, list(OWNERS), 7) == {}, "seven steps, seven times each: nothing is wrong"
    assert dict(module.not_once(histograms, list(OWNERS), 8)) == dict.fromkeys(OWNERS, 7), "one step did nothing"


# diverge


def _ranks(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "a": torch.randn(6, 5, generator=generator),
        "b": torch.zeros(3, 2),
        "c": torch.randn(7, generator=generator),
    }
    return [{name: t.to(dtype, copy=True) for name, t in made.items()} for _ in range(count)]


def _report(module: ModuleType, weights: list[dict[str, Tensor]], wanted: dict[str, list[int]], what: str) -> None:
    kept = [{n: t.clone() for n, t in w.items()} for w in weights]
    found = {name: list(ranks) for name, ranks in module.find_diverged(weights).items()}
    assert found == wanted, f"{what}: reported was {found}, it must be {wanted}"
    same = [
        torch.equal(a[n].nan_to_num(7.0), b[n].nan_to_num(7.0)) for a, b in zip(kept, weights, strict=True) for n in a
    ]
    assert all(same), "the weights given were changed"


def _odd_one(module: ModuleType) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        _report(module, _ranks(4, dtype), {}, f"four equal ranks, {dtype}")
        for odd in range(4):
            weights = _ranks(4, dtype)
            weights[odd]["a"][5, 4] = torch.nextafter(weights[odd]["a"][5, 4].float(), torch.tensor(9.0)).to(dtype) + (
                0 if dtype == torch.float32 else 0.01
            )
            _report(module, weights, {"a": [odd]}, f"rank {odd} differs in one element of 'a', {dtype}")
    weights = _ranks(4)
    weights[2]["c"][[0, 1]] = weights[2]["c"][[1, 0]]
    _report(module, weights, {"c": [2]}, "on rank 2 two elements of 'c' changed places")


def _bits(module: ModuleType) -> None:
    weights = _ranks(3)
    weights[1]["b"][0, 0] = -0.0
    _report(module, weights, {"b": [1]}, "rank 1 has -0.0 where the others have 0.0")
    weights = _ranks(3)
    for tensors in weights:
        tensors["a"][0, 0] = float("nan")
    _report(module, weights, {}, "the same NaN on all ranks")
    weights = _ranks(3)
    weights[0]["a"] = weights[0]["a"].t().contiguous().t()
    _report(module, weights, {}, "rank 0 stores 'a' column by column, with the same values")


def _several(module: ModuleType) -> None:
    weights = _ranks(5)
    weights[1]["a"] += 1
    weights[4]["a"] += 2
    weights[0]["c"] += 1
    _report(module, weights, {"a": [1, 4], "c": [0]}, "ranks 1 and 4 differ in 'a', each in its way, and rank 0 in 'c'")
    weights = _ranks(2)
    weights[1]["b"] += 1
    _report(module, weights, {"b": [1]}, "two ranks, one against one")


CHECKS = {
    "lpt": [
        Check("the rule", _rule, "sort by (-cost, name); then min over (load, rank)"),
        Check("the caller's order does not matter", _any_order, "what decides between equal costs?"),
        Check("within 4/3 - 1/(3R) of the bound", _balance, "the dearest first, to the emptiest rank"),
    ],
    "payload": [
        Check("owners: one reduce, and so many broadcasts", _owners, "count the uses of a weight in a step"),
        Check("baselines, padding included", _baselines, "ceil(rows / R) rows a rank, and R parts are put in"),
        Check("a real model", _real_model, "weights and gradients have their own widths"),
    ],
    "once": [
        Check("the total is fooled", _broken, "only one rank may change its mind"),
        Check("each name is not", _caught, "add over ranks, never over names; start every name at 0"),
        Check("over several steps", _steps, "compare with the number of steps"),
    ],
    "diverge": [
        Check("the odd one out", _odd_one, "group equal ranks; the largest group is right"),
        Check("bits, not values", _bits, "contiguous(), then view(torch.uint8)"),
        Check("several ranks and names", _several, "everyone outside of the largest group"),
    ],
}
