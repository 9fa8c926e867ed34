"""Time the codecs on recorded updates of SmolLM2, or on a synthetic stream where none is recorded.

Rows compare ``fast`` with the paper's format, and ``small`` and the scan with fixed rates. Run as a module it measures
all parts of all codecs on every stream that there is and writes ``data/results/pulse-bench.json``:
``python -m labs.pulse.stream`` records the streams, ``python -m labs.pulse.bench`` measures.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dist_lib import results
from dist_lib.pulse import apply, decode, diff, digest_state, encode
from dist_lib.pulse.codecs import CODECS
from dist_lib.pulse.state import State
from labs.bench import Pair, Row
from labs.framework import LabError
from labs.pulse.codec_timing import CodecTiming, Update, Work, make_update, synthetic_update, time_codec
from labs.pulse.stream import FOLDER, recorded_stream

OUT = Path(__file__).resolve().parents[2] / "data" / "results" / "pulse-bench.json"
RATE = 25e6  # changed cells a second
SCAN = 1.5e9  # bytes of weights a second and core
SMALLER = {"fast": 0.6, "small": 0.4}  # most bytes against the paper's format
ABOVE_REFERENCE = 1.10
DISTANCES = (1, 8)  # steps between two states: a receiver that is behind takes one merged patch


def recorded() -> list[Path]:
    """Folders of recorded streams with float32 masters or bfloat16 storage that have at least one step."""
    return [
        f
        for f in sorted(FOLDER.glob("*"))
        if re.fullmatch(r"(fp32|bf16)-[^-]*-\d+", f.name) and list(f.glob("step-*.pt"))
    ]


def last_states(folder: Path) -> dict[int, tuple[State, State]]:
    """The last state of a recorded stream and the one 1 and 8 steps before it, by distance."""
    steps = len(list(folder.glob("step-*.pt")))
    kept = {steps - d for d in (0, *DISTANCES)}
    states = {i: state for i, state in enumerate(recorded_stream(folder)) if i in kept}
    return {d: (states[steps - d], states[steps]) for d in DISTANCES if steps - d in states}


@lru_cache(maxsize=1)
def masters() -> tuple[Update, ...]:
    """What rows are measured on: updates with float32 masters, over one step and over eight."""
    folders = [f for f in recorded() if f.name.startswith("fp32")]
    if folders:
        return tuple(make_update(*pair) for f in folders for pair in last_states(f).values())
    return tuple(synthetic_update(lr=lr) for lr in (1e-6, 3e-6))


def checked(codec: str) -> list[Work]:
    """The codec on each update.

    Raises:
        LabError: it does not give back the new state, or needs more bytes than it may: then its time says nothing.
    """
    works = [Work(update, codec) for update in masters()]
    for work in works:
        size = sum(map(len, work.coded))
        if not work.check():
            raise LabError(f"{codec}: what was applied is not the new state")
        paper = sum(map(len, Work(work.update, "paper").coded))
        if size > SMALLER.get(codec, 1.0) * paper:
            raise LabError(f"{codec}: {size} bytes against {paper} of the paper's format, above {SMALLER[codec]:g}")
        if codec == "small" and size > ABOVE_REFERENCE * work.update.reference_bytes:
            raise LabError(f"{codec}: {size} bytes, above {ABOVE_REFERENCE} x {work.update.reference_bytes:.0f}")
    return works


def _run(works: list[Work], *parts: str) -> Callable[[], None]:
    def run() -> None:
        for work in works:
            for part in parts:
                getattr(work, part)()

    return run


def _timed(run: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return timed


def fast_against_paper() -> Pair:
    """Scan, encode and apply of ``fast`` and of the paper's format."""
    return Pair(_run(checked("fast"), "scan", "encode", "apply"), _run(checked("paper"), "scan", "encode", "apply"))


def small_against_rate(part: str) -> Pair:
    """One part of ``small``, and the time that 25 million changed cells a second take."""
    works = checked("small")
    changed = sum(work.update.changed for work in works)
    return Pair(_timed(_run(works, part)), lambda: changed / RATE, seconds=True)


def scan_against_rate() -> Pair:
    """The scan on one thread, and the time that 1.5 GB of weights a second take."""
    works = [Work(update, "fast", workers=1) for update in masters()]
    nbytes = sum(old.nbytes for work in works for old, *_ in work.update.segments)
    return Pair(_timed(_run(works, "scan")), lambda: nbytes / SCAN, seconds=True)


STREAM = "recorded updates of SmolLM2 (weights dequantised from Q4_1)" if recorded() else "synthetic AdamW updates"
ROWS = (
    Row(
        name="fast-codec",
        what=f"codec fast: scan, encode and apply {STREAM}, float32 masters, 2 threads, at most 0.6 of the bytes",
        baseline="the paper's format: row and column deltas, values, zstd-1",
        target=1.1,
        make=fast_against_paper,
    ),
    Row(
        name="small-codec-encode",
        what=f"codec small: encode the changes of {STREAM}, 2 threads, at most 0.4 of the paper's bytes",
        baseline="25 million changed cells a second",
        target=1.0,
        make=lambda: small_against_rate("encode"),
    ),
    Row(
        name="small-codec-apply",
        what=f"codec small: copy the base and apply the changes of {STREAM}, 2 threads",
        baseline="25 million changed cells a second",
        target=1.0,
        make=lambda: small_against_rate("apply"),
    ),
    Row(
        name="bit-scan",
        what=f"find the changed cells of {STREAM}, 1 thread",
        baseline="1.5 GB of weights a second",
        target=1.0,
        make=scan_against_rate,
    ),
)


def describe(update: Update, timing: CodecTiming) -> dict[str, Any]:
    """One codec on one update, with rates: changed cells a second and GB of weights a second of each part."""
    rates = {
        part: {"seconds": s, "changed_per_s": update.changed / s, "weights_gb_s": update.nbytes / s / 1e9}
        for part, s in timing.seconds.items()
    }
    return {
        "bytes": timing.nbytes,
        "bytes_per_change": timing.nbytes / update.changed,
        "of_reference": timing.nbytes / update.reference_bytes,
        "full_over_patch": update.nbytes / timing.nbytes,
        "parts": rates,
        "peak_mib": {part: peak / 2**20 for part, peak in timing.peak_bytes.items()},
        "workers": timing.workers,
    }


def end_to_end(old: State, new: State, codec: str, repeats: int) -> dict[str, float]:
    """Least seconds of the library's calls, hashing, sealing and fresh memory included, and the file's bytes."""
    known = digest_state(old)
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        value = call(*args, **options)
        found[name] = min(found.get(name, float("inf")), time.perf_counter() - begin)
        return value

    for _ in range(repeats):
        data = timed("encode_s", encode, timed("diff_s", diff, old, new, base_digest=known), codec)
        timed("apply_s", apply, timed("decode_s", decode, data), old, known=known)
    return found | {"file_bytes": float(len(data))}


def measure_update(old: State, new: State, repeats: int) -> dict[str, Any]:
    """All codecs on one update."""
    update = make_update(old, new)
    codecs = {}
    for codec in CODECS:
        timing = time_codec(update, codec, repeats=repeats)
        codecs[codec] = describe(update, timing) | {"library": end_to_end(old, new, codec, max(2, repeats // 2))}
    single = time_codec(update, "small", workers=1, repeats=repeats).seconds
    ours = codecs["fast"]["parts"], codecs["paper"]["parts"]
    parts = ("scan", "encode", "apply")
    return {
        "cells": update.cells,
        "changed": update.changed,
        "density": update.changed / update.cells,
        "reference_bytes_per_change": update.reference_bytes / update.changed,
        "codecs": codecs,
        "fast_bytes_of_paper": codecs["fast"]["bytes"] / codecs["paper"]["bytes"],
        "small_bytes_of_paper": codecs["small"]["bytes"] / codecs["paper"]["bytes"],
        "fast_time_of_paper": sum(ours[0][p]["seconds"] for p in parts) / sum(ours[1][p]["seconds"] for p in parts),
        "scan_gb_s_per_core": update.nbytes / single["scan"] / 1e9,
        "small_one_thread_s": single,
    }


def main(repeats: Annotated[int, typer.Option(help="Calls of each part; the least time counts.")] = 9) -> None:
    """Measure all codecs on all recorded streams and write data/results/pulse-bench.json."""
    console = Console()
    torch.set_num_threads(1)
    folders = recorded()
    if not folders:
        console.print("No stream is recorded; run: python -m labs.pulse.stream")
        raise typer.Exit(1)
    streams: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for distance, pair in last_states(folder).items():
            found = measure_update(*pair, repeats)
            streams.setdefault(folder.name, {})[f"{distance} steps" if distance > 1 else "1 step"] = found
            small = found["codecs"]["small"]
            rates = ", ".join(f"{part} {r['changed_per_s'] / 1e6:.1f}" for part, r in small["parts"].items())
            console.print(
                f"{folder.name}, {distance}: {found['density']:.2%} changed; fast {found['fast_bytes_of_paper']:.3f} "
                f"of the paper's bytes in {found['fast_time_of_paper']:.2f} of its time; small "
                f"{found['small_bytes_of_paper']:.3f}, {small['of_reference']:.3f} of the reference; million changed "
                f"cells a second: {rates}"
            )
    record = {
        "hardware": results.hardware(),
        "versions": results.versions(),
        "weights": "SmolLM2-135M dequantised from Q4_1: real sizes, but not the model's original bits",
        "memory": "results are written into memory that stands ready, except under 'library'",
        "streams": streams,
        "synthetic": {
            f"{storage}-{lr:g}": {
                codec: describe(update, time_codec(update, codec, repeats=repeats)) for codec in CODECS
            }
            | {"density": update.changed / update.cells}
            for storage, lr in (("fp32", 1e-6), ("fp32", 3e-6), ("bf16", 3e-6))
            for update in [synthetic_update(lr=lr, storage=storage)]
        },
    }
    results.write_text(OUT, json.dumps(record, indent=1, sort_keys=True) + "\n")
    console.print(f"results: {OUT}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
