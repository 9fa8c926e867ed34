"""What the four exercises must do. Each check stands for a way in which a sparse sync ends with the wrong bits."""

import random
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from dist_lib.checks import Check


def _refused(call: Callable[[], object], what: str) -> None:
    try:
        found = call()
    except ValueError:
        return
    except MemoryError:
        raise AssertionError(f"{what}: memory was asked for before the claim was checked") from None
    raise AssertionError(f"{what} must raise ValueError; got {str(found)[:60]}")


# bits

NAN, OTHER_NAN = 0x7FC0, 0x7FC1


def _bf16(*bits: int) -> Tensor:
    return torch.tensor([b - 65536 if b >= 32768 else b for b in bits], dtype=torch.int16).view(torch.bfloat16)


def _words(t: Tensor) -> list[int]:
    return [int(w) & 0xFFFF for w in t.contiguous().reshape(-1).view(torch.int16)]


def _changed_bits(module: ModuleType) -> None:
    cases = [
        ("0.0 becomes -0.0", (0, 0x3F80), (0x8000, 0x3F80), [0]),
        ("the same NaN on both sides", (NAN, 0x3F80), (NAN, 0x3F81), [1]),
        ("a NaN becomes another NaN", (NAN, NAN), (NAN, OTHER_NAN), [1]),
        ("nothing changes", (1, 2, 3), (1, 2, 3), []),
        ("everything changes", (1, 2, 3), (2, 3, 4), [0, 1, 2]),
        ("no cells", (), (), []),
    ]
    for what, old, new, wanted in cases:
        found = module.changed(_bf16(*old), _bf16(*new))
        assert found.dtype == torch.int64 and found.ndim == 1, f"{what}: positions are one-dimensional int64"
        assert found.tolist() == wanted, f"{what}: positions {found.tolist()}, must be {wanted}"
    every = _bf16(*range(65536))
    found = module.changed(every, every.clone())
    assert found.numel() == 0, f"all 65,536 patterns against themselves: {found.numel()} are called changed"


def _shapes(module: ModuleType) -> None:
    old, new = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.bfloat16)
    new[1, 2] = new[3, 0] = 1.0
    assert module.changed(old, new).tolist() == [8, 18], "a matrix: positions are counted row by row"
    found = module.changed(old.t(), new.t()).tolist()
    assert found == [3, 9], f"a transposed matrix: {found}, must be [3, 9], its rows one after the other"
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert module.changed(one, -one).tolist() == [0], "a tensor without dimensions has one cell"
    patched = module.apply(old.t(), torch.tensor([3, 9]), torch.ones(2, dtype=torch.bfloat16))
    assert patched.shape == (6, 4) and torch.equal(patched, new.t()), "a patch of a transposed matrix went elsewhere"


def _overwrites(module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    served = torch.randn(3000, generator=generator).bfloat16()
    trained = served.clone()
    for step in range(50):
        moved = trained + (0.3 * torch.randn(3000, generator=generator) * trained.float().abs()).bfloat16()
        new = torch.where(torch.rand(3000, generator=generator) < 0.05, moved, trained)
        positions = module.changed(trained, new)
        values = new[positions].clone()
        kept = _words(served)
        made = module.apply(served, positions, values)
        assert _words(served) == kept, "the base was written to: it must serve until the copy has been checked"
        wrong = sum(a != b for a, b in zip(_words(made), _words(new), strict=True))
        assert not wrong, f"after {step + 1} patches {wrong} cells have other bits than the trainer's"
        again = module.apply(made, positions, values)
        assert _words(again) == _words(made), "the same patch a second time changed something"
        served, trained = made, new
    values = _bf16(0x8000, NAN, OTHER_NAN)
    made = module.apply(_bf16(0, 1, 2, 3), torch.tensor([0, 1, 3]), values)
    assert _words(made) == [0x8000, NAN, 2, OTHER_NAN], "-0.0 and NaN must arrive with all their bits"
    empty = module.apply(served, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bfloat16))
    assert _words(empty) == _words(served), "an empty patch changed something"


# gaps


def _format(module: ModuleType) -> None:
    cases = {
        (): b"",
        (0,): b"\0",
        (0, 1, 2): b"\0\0\0",
        (5, 7): b"\x05\x01",
        (254, 510): b"\xfe" + b"\xff" + bytes(8),
        (300,): b"\xff" + (45).to_bytes(8, "little"),
        (2**33, 2**33 + 2): b"\xff" + (2**33 - 255).to_bytes(8, "little") + b"\x01",
    }
    for positions, wanted in cases.items():
        found = bytes(module.encode(list(positions)))
        assert found == wanted, f"{positions} became {found.hex(' ')}, must be {wanted.hex(' ')}"


def _again(module: ModuleType) -> None:
    rng = random.Random(0)
    for cells, count in ((1, 0), (1, 1), (40, 40), (5000, 60), (2**40, 30), (100_000, 300)):
        positions = sorted(rng.sample(range(cells), count))
        data = bytes(module.encode(positions))
        found = list(module.decode(data, count, cells))
        assert found == positions, f"{count} of {cells} positions did not come back"


def _hostile(module: ModuleType) -> None:
    data = bytes(module.encode([3, 500, 501]))
    for cut in range(len(data)):
        _refused(lambda part=data[:cut]: module.decode(part, 3, 1000), f"{cut} of {len(data)} bytes")  # type: ignore[misc]
    _refused(lambda: module.decode(data + b"\0", 3, 1000), "a byte after the last position")
    _refused(lambda: module.decode(data, 2, 1000), "a position after the last that was announced")
    _refused(lambda: module.decode(data, 3, 501), "position 501 of a tensor of 501 cells")
    _refused(lambda: module.decode(b"\xff" + b"\xff" * 8, 1, 2**40), "a skip of 2^64 cells")
    _refused(lambda: module.decode(b"", -1, 10), "a negative count")
    _refused(lambda: module.decode(b"\0\0", 2, 1), "more positions than cells")


def _huge_claim(module: ModuleType) -> None:
    _refused(lambda: module.decode(b"\0" * 8, 10**15, 10**16), "10^15 positions in 8 bytes")


# order


class _Crash(Exception):
    pass


class _Store:
    def __init__(self, objects: dict[str, bytes] | None = None, alive: int = 10**9) -> None:
        self.objects, self.alive = dict(objects or {}), alive

    def put(self, name: str, data: bytes) -> None:
        if self.alive == 0:
            raise _Crash
        self.alive -= 1
        self.objects[name] = bytes(data)

    def get(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def names(self) -> list[str]:
        return sorted(self.objects)


PAYLOADS = [f"weights of version {v}".encode() * 3 for v in range(12)]


def _filled(module: ModuleType, versions: int) -> _Store:
    store = _Store()
    for version in range(versions):
        module.publish(store, version, PAYLOADS[version])
    return store


def _says(found: object, wanted: tuple[int, bytes] | None, what: str) -> None:
    assert found == wanted, f"{what}: a receiver gets {found!r}, must be {wanted!r}"


def _newest(module: ModuleType) -> None:
    _says(module.follow(_Store()), None, "an empty store")
    for versions in (1, 2, 11):
        _says(module.follow(_filled(module, versions)), (versions - 1, PAYLOADS[versions - 1]), f"{versions} versions")
    store = _filled(module, 2)
    module.publish(store, 2, PAYLOADS[0])
    _says(module.follow(store), (2, PAYLOADS[0]), "version 2 has the bytes of version 0")
    module.publish(store, 3, b"")
    _says(module.follow(store), (3, b""), "version 3 is empty")


def _crashes(module: ModuleType) -> None:
    for before in (0, 1, 3):
        old = (before - 1, PAYLOADS[before - 1]) if before else None
        for writes in range(50):
            store = _Store(_filled(module, before).objects, writes)
            try:
                module.publish(store, before, PAYLOADS[before])
            except _Crash:
                found = module.follow(_Store(store.objects))
                new = (before, PAYLOADS[before])
                assert found in (old, new), f"killed after {writes} writes: {found!r} is neither old nor new"
                back = _Store(store.objects)
                module.publish(back, before, b"after the crash")
                _says(module.follow(back), (before, b"after the crash"), "the publisher came back")
            else:
                break
        else:
            raise AssertionError("a publication of more than 50 writes")


def _damage(module: ModuleType) -> None:
    good = _filled(module, 4).objects
    allowed = [(v, PAYLOADS[v]) for v in (3, 2)]
    touched = {n for n in good if n not in _filled(module, 3).objects or good[n] != _filled(module, 3).objects[n]}
    for name in sorted(touched):
        for what, data in (("lost", None), ("cut", good[name][:-1]), ("one bit flipped", _flip(good[name]))):
            objects = {n: d for n, d in good.items() if n != name} | ({} if data is None else {name: data})
            found = module.follow(_Store(objects))
            assert found in allowed, f"{name} was {what}: {found!r}, must be version 3 or else version 2"


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else b"\1"


def _slow_reader(module: ModuleType) -> None:
    store = _filled(module, 3)
    kept = dict(store.objects)
    module.publish(store, 3, PAYLOADS[3])
    lost = [n for n, d in kept.items() if store.objects.get(n) != d and PAYLOADS[2] in d]
    assert not lost, f"publishing version 3 changed {lost}, which holds the bytes of version 2"


# gate


def _weights(seed: int, cells: int = 4000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta = 0.02 * torch.randn(cells, generator=generator)
    return theta, 1e-5 * torch.randn(cells, generator=generator)


def _sees(module: ModuleType) -> None:
    theta, update = _weights(0)
    tiny = torch.tensor([2.0**-149, 0.0, -0.0, 1.0, 1.0, 1.0, 1.00390625])
    steps = torch.tensor([2.0**-147, 0.0, 0.0, 2.0**-8, 2.0**-9, -(2.0**-8), 1e-6])
    for a, b, what in ((theta, update, "random weights"), (tiny, steps, "ties, powers of two and signs of zero")):
        found = module.visible(a, b)
        assert found.dtype == torch.bool and found.shape == a.shape, "visible must be bool, of the shape of theta"
        for i in range(a.numel()):
            x, u = a[i].clone(), b[i].clone()
            old, new = x.bfloat16().view(torch.int16).item(), (x - u).bfloat16().view(torch.int16).item()
            assert bool(found[i]) == (old != new), (
                f"{what}: theta {float(x):.9g}, update {float(u):.3g}: {bool(found[i])} is wrong"
            )


def _conserves(module: ModuleType) -> None:
    theta, move = _weights(1)
    error = 1e-6 * torch.randn(theta.numel(), generator=torch.Generator().manual_seed(5))
    local, kept_arguments = theta - move, [theta.clone(), (theta - move).clone(), error.clone()]
    sent, kept = module.exchange(theta, local, error)
    update, mask = (theta - local) + error, module.visible(theta, (theta - local) + error)
    assert torch.equal(sent + kept, update), "sent + kept is not the update, bit for bit"
    assert torch.equal(sent != 0, mask & (update != 0)), "what is sent is not what is visible"
    assert not bool(((sent != 0) & (kept != 0)).any()), "a coordinate is sent and kept as well"
    same = all(torch.equal(a, b) for a, b in zip((theta, local, error), kept_arguments, strict=True))
    assert same, "an argument was written to"


def _arrives(module: ModuleType) -> None:
    theta = torch.full((8,), 0.019)
    step = torch.full((8,), 1e-6)
    error, arrived = torch.zeros(8), torch.zeros(8, dtype=torch.float64)
    for _ in range(200):
        sent, error = module.exchange(theta, theta - step, error)
        arrived += sent.double()
    total = arrived + error.double()
    expected = 200 * (theta - (theta - step)).double()
    assert bool((arrived > 0).all()), "an update that is small in each round was never sent in 200 rounds"
    assert torch.allclose(total, expected, rtol=1e-4), (
        f"200 updates of {float(expected[0]) / 200:.2e} became {float(total[0]):.3e}, not {float(expected[0]):.3e}"
    )


CHECKS = {
    "bits": [
        Check("bits decide", _changed_bits, "view(torch.int16), then compare"),
        Check("any shape, row by row", _shapes, "make it contiguous before you flatten it"),
        Check("overwrite a copy", _overwrites, "clone, then assign; adding rounds"),
    ],
    "gaps": [
        Check("the format", _format, "the first gap is the position itself; 255 announces eight bytes"),
        Check("there and back", _again, "remember the position before"),
        Check("damaged and hostile data", _hostile, "check before each read, each position, and the end"),
        Check("a false count costs nothing", _huge_claim, "a position has at least one byte"),
    ],
    "order": [
        Check("the newest version", _newest, "sort versions as numbers"),
        Check("killed between any two writes", _crashes, "payload, then marker"),
        Check("damaged objects", _damage, "the marker holds the digest of the payload; walk back to the one before"),
        Check("slow readers", _slow_reader, "never write over a payload: name it by its content"),
    ],
    "gate": [
        Check("the cast decides", _sees, "bits of two casts; no threshold"),
        Check("nothing is lost and nothing doubled", _conserves, "each coordinate goes to one of the two"),
        Check("small updates arrive in the end", _arrives, "the gate looks at the update with the error in it"),
    ],
}
