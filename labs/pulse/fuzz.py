"""Feed the decoders of PULSE with bytes that no encoder wrote, and check that they only ever decode or refuse.

Four doors are tried: a patch file as it comes; header and body under a seal and a digest that are made to fit, so that
what lies behind these checks is reached; one segment for each codec and several dtypes over a known base; a manifest.
What decodes must encode to the same bytes again (a segment: to bytes that decode to the same), and nothing else may be
raised than :class:`~dist_lib.pulse.errors.PulseError`. Atheris mutates by coverage where it is installed (Linux on
x86-64); elsewhere mutations are drawn at random.

    python -m labs.pulse.fuzz --inputs 1000000
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64, torch.float64)
DOORS = ("file", "sealed", "segment", "manifest")
CELLS = 700
GRANTED = 1 << 22
"""Bytes that the limits grant to a state."""


def base_state() -> dict[str, torch.Tensor]:
    """A small state of several dtypes and shapes, with a tie, a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(11)
    w = (torch.randn(20, 35, generator=generator) * 0.02).bfloat16()
    return {
        "a.w": w,
        "a.tied": w,
        "b": torch.randn(64, generator=generator),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "i": torch.arange(9),
    }


def next_state() -> dict[str, torch.Tensor]:
    """Another version of it: cells changed, one tensor new, one retyped, one gone, one the same."""
    base = base_state()
    w, b = base["a.w"].clone(), base["b"].clone()
    w.view(torch.int16).view(-1)[3::17] ^= 1
    b.view(torch.int32)[::9] += 2
    return {"a.w": w, "a.tied": w, "b": b, "scalar": base["scalar"], "i": base["i"].int(), "new": torch.ones(6)}


def _dtype_base(dtype: torch.dtype) -> np.ndarray[Any, Any]:
    from dist_lib.pulse.state import as_words

    return as_words((torch.randn(CELLS, generator=torch.Generator().manual_seed(5)) * 0.02).to(dtype))


class Doors:
    """The checks, with everything they need at hand. ``try_one`` takes one input and says what became of it."""

    def __init__(self) -> None:
        from dist_lib.pulse import errors, manifest, patch, state
        from dist_lib.pulse import format as file_format
        from dist_lib.pulse.codecs import CODECS, Place, decode_segment, encode_segment
        from dist_lib.pulse.wire import Reader

        self.errors, self.manifest, self.patch, self.format, self.wire_state = (
            errors,
            manifest,
            patch,
            file_format,
            state,
        )
        self.limits = file_format.Limits(header_bytes=1 << 16, tensors=64, state_bytes=GRANTED)
        self.base = base_state()
        self.known = state.digest_state(self.base, workers=1)
        self.segments = [(codec, dtype, _dtype_base(dtype)) for codec in CODECS.values() for dtype in DTYPES]
        self._place, self._decode, self._encode, self._reader = Place, decode_segment, encode_segment, Reader
        self.counts: Counter[str] = Counter()

    def seeds(self) -> list[bytes]:
        """Valid inputs to begin with, at least one for each door, codec and dtype."""
        new, made = next_state(), []
        for codec in ("paper", "fast", "small"):
            for old in (self.base, None):
                data = self.patch.encode(self.patch.diff(old, new, base_version=4), codec, workers=1)
                header = int.from_bytes(data[8:12], "little")
                made += [b"\0" + data, b"\1" + header.to_bytes(2, "little") + data[self.format.FIXED :]]
        for i, (coder, dtype, words) in enumerate(self.segments):
            for step in (3, 40):
                changed = words.copy()
                changed[1::step] ^= changed.dtype.type(1)
                changed[5::97] += changed.dtype.type(3)
                spec = self.wire_state.TensorSpec(dtype, (CELLS // 35, 35))
                made.append(bytes((2, i)) + self._encode(coder, words, changed, self._place(spec, 0)))
        parts = (self.manifest.Part("0" * 64, 12), self.manifest.Part("1" * 64, 1))
        for manifest in (
            self.manifest.Manifest("patch", 3, 2, parts, 1.5),
            self.manifest.Manifest("anchor", 0, None, parts[:1], 0.0),
        ):
            made.append(b"\3" + manifest.write())
        return made

    def try_one(self, data: bytes) -> str:
        """Put one input through the door that its first byte names.

        Returns:
            ``"<door> decoded"`` or ``"<door> refused"``.

        Raises:
            AssertionError: something decoded, but does not encode to the same.
            Exception: whatever a decoder must not raise.
        """
        door = DOORS[data[0] % len(DOORS)] if data else "file"
        try:
            getattr(self, f"_{door}")(data[1:])
        except self.errors.PulseError:
            outcome = f"{door} refused"
        else:
            outcome = f"{door} decoded"
        self.counts[outcome] += 1
        return outcome

    def _file(self, data: bytes) -> None:
        patch = self.patch.decode(data, self.limits)
        if self.patch.encode(patch, workers=1) != data:
            raise AssertionError("a patch that decodes is encoded to other bytes")
        base = {} if patch.is_anchor else self.base
        result = self.patch.apply(patch, base, known=None if patch.is_anchor else self.known, workers=1)
        if self.wire_state.digest_state(result, workers=1).whole != patch.digest:
            raise AssertionError("a patch was applied, but the result has another digest")

    def _sealed(self, data: bytes) -> None:
        """Header and body with the sizes, the seal and the digest of the result that fit them."""
        length = min(int.from_bytes(data[:2], "little"), max(0, len(data) - 2))
        header, body = bytearray(data[2 : 2 + length]), data[2 + length :]
        reader = self._reader(bytes(header), "header")
        reader.byte()
        based = reader.byte(1)
        if based:
            reader.number((1 << 63) - 1)
            reader.raw(32)
        reader.number((1 << 63) - 1)
        at = len(header) - reader.left
        reader.raw(32)
        entries = self.format._read_entries(reader, memoryview(body), bool(based), self.limits)
        specs, digests = {e.name: e.spec for e in entries}, {e.name: e.digest for e in entries}
        header[at : at + 32] = self.wire_state.whole_digest(specs, digests)
        sizes = len(header).to_bytes(4, "little") + len(body).to_bytes(8, "little")
        seal = hashlib.sha256(sizes + header + body).digest()
        self._file(b"".join((self.format.MAGIC, sizes, seal, header, body)))

    def _segment(self, data: bytes) -> None:
        codec, dtype, old = self.segments[data[0] % len(self.segments) if data else 0]
        place = self._place(self.wire_state.TensorSpec(dtype, (CELLS // 35, 35)), 0)
        new = self._decode(codec, memoryview(data[1:]), old, place)
        again = self._decode(codec, memoryview(self._encode(codec, old, new, place)), old, place)
        if not np.array_equal(new, again):
            raise AssertionError("a segment decodes, but what it decodes to is coded as something else")

    def _manifest(self, data: bytes) -> None:
        if self.manifest.read_manifest(data).write() != data:
            raise AssertionError("a manifest that is read is written as other bytes")


def mutate(data: bytes, random: np.random.Generator, others: Sequence[bytes]) -> bytes:
    """One to four edits: a byte set, a bit flipped, bytes removed, repeated, inserted, or taken from another input."""
    out = bytearray(data)
    for _ in range(int(random.integers(1, 5))):
        at, size = int(random.integers(0, len(out) + 1)), int(random.integers(1, 9))
        kind = int(random.integers(0, 6))
        if kind == 0 and at < len(out):
            out[at] = int(random.choice((0, 1, 127, 128, 255, int(random.integers(0, 256)))))
        elif kind == 1 and at < len(out):
            out[at] ^= 1 << int(random.integers(0, 8))
        elif kind == 2:
            del out[at : at + size]
        elif kind == 3:
            out[at:at] = out[at : at + size]
        elif kind == 4:
            out[at:at] = random.bytes(size)
        else:
            other = others[int(random.integers(0, len(others)))]
            start = int(random.integers(0, len(other)))
            out[at : at + size] = other[start : start + size]
    return bytes(out)


def _growth_mib(before: int) -> float:
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _ready() -> tuple[Doors, list[bytes], int]:
    doors = Doors()
    seeds = doors.seeds()
    for seed in seeds:
        if not doors.try_one(seed).endswith("decoded"):
            raise AssertionError(f"a valid input was refused: {seed[:40]!r}")
    doors.counts.clear()
    return doors, seeds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _random(inputs: int, seconds: float, seed: int, out: Path) -> None:
    doors, seeds, before = _ready()
    random, done, end = np.random.default_rng(seed), 0, time.monotonic() + seconds
    while done < inputs and time.monotonic() < end:
        doors.try_one(mutate(seeds[int(random.integers(0, len(seeds)))], random, seeds))
        done += 1
    out.write_text(json.dumps({"inputs": done, "outcomes": doors.counts, "growth_mib": _growth_mib(before)}))


def _atheris(inputs: int, seconds: float, seed: int, out: Path) -> None:
    atheris: Any = importlib.import_module("atheris")
    package = Path(__file__).parents[2] / "dist_lib" / "pulse"
    compiled = [f"dist_lib.pulse.{path.stem}" for path in package.glob("_*.py")]  # Numba cannot read traced functions
    with atheris.instrument_imports(include=["dist_lib.pulse"], exclude=compiled):
        doors, seeds, before = _ready()
    corpus = out.parent / "corpus"
    corpus.mkdir()
    for i, data in enumerate(seeds):
        (corpus / f"{i:04d}").write_bytes(data)
    done = 0

    def one(data: bytes) -> None:
        nonlocal done
        doors.try_one(data)
        done += 1
        if done == 1 or done % 1000 == 0 or done >= inputs:
            out.write_text(json.dumps({"inputs": done, "outcomes": doors.counts, "growth_mib": _growth_mib(before)}))

    flags = [f"-runs={inputs}", f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-max_len=4096"]
    flags += ["-verbosity=0", "-print_final_stats=0", "-rss_limit_mb=0", f"-artifact_prefix={out.parent}/"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one)
    atheris.Fuzz()


def has_atheris() -> bool:
    """Whether mutations can be guided by coverage here."""
    return importlib.util.find_spec("atheris") is not None


def fuzz(inputs: int, *, seconds: float = 3600.0, seed: int = 0, engine: str = "auto") -> dict[str, Any]:
    """Fuzz in a process of its own.

    Args:
        inputs: how many.
        seconds: stop after this time even so.
        seed: of the mutations.
        engine: ``"atheris"``, ``"random"``, or ``"auto"`` for the first where it is installed.

    Returns:
        engine; inputs; outcomes (door and ``decoded`` or ``refused``, to how often); growth_mib (peak memory above that
        after the valid inputs); seconds.

    Raises:
        AssertionError: an input was found that a decoder does not handle; the message has it and the traceback.
    """
    chosen = ("atheris" if has_atheris() else "random") if engine == "auto" else engine
    if chosen not in ("atheris", "random") or inputs < 1:
        raise ValueError(f"engine is auto, atheris or random and inputs at least 1, not {engine!r} and {inputs}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "labs.pulse.fuzz", "--worker", str(out), "--engine", chosen]
        command += ["--inputs", str(inputs), "--seconds", str(seconds), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        if done.returncode != 0 or not out.exists():
            found = [path.read_bytes() for path in Path(folder).glob("crash-*")]
            raise AssertionError(f"inputs that break a decoder: {found}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
    return {"engine": chosen, **result, "seconds": round(time.monotonic() - start, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m labs.pulse.fuzz", description="Fuzz the decoders of patches.")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time even so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("auto", "atheris", "random"), default="auto")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        torch.set_num_threads(1)
        work = _atheris if options.engine == "atheris" else _random
        work(options.inputs, options.seconds, options.seed, options.worker)
        return 0
    try:
        result = fuzz(options.inputs, seconds=options.seconds, seed=options.seed, engine=options.engine)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
