"""A recorded stream of real updates: SmolLM2-135M learns one-digit sums from rewards; ``python -m labs.pulse.stream``.

Every step is GRPO with real gradients of the whole model, in miniature: 16 answers of two tokens. The weights are
dequantised Q4_1, not the original bfloat16 ones, so their sizes are those of the real model but their last bits are
not: a tenth of them lies exactly between two bfloat16 numbers, where any step shows. So float32 masters start anywhere
in their rounding cells with equal chance, as after a long run (``--start loaded`` takes them as they come). States are
written to a folder as plain differences of bits, without any codec of the library, and read back by
:func:`recorded_stream`.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from dist_lib import results
from dist_lib.models import Decoder, load_smollm2
from dist_lib.pulse.sparsity_measures import by_layer, count_changes, reference_bits, total, ulp
from dist_lib.pulse.state import as_words, find_ties
from dist_lib.tasks import GrpoConfig, GrpoStep, GrpoTrainer, sample_rollouts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "pulse-stream"
SUMMARY = ROOT / "data" / "results" / "pulse-stream.json"
RATES, STORAGES, DISTANCES = (1e-6, 3e-6), ("fp32", "bf16"), (1, 2, 4, 8)
SHOTS = ((2, 3), (4, 5))


class FewShotSums:
    """Sums of two digits behind two worked examples; the answer is two tokens, a number and the end of its line.

    Args:
        tokenizer: of the model; must give every digit and sign one token.

    Raises:
        ValueError: it does not.
    """

    answer_len = 2

    def __init__(self, tokenizer: Any) -> None:
        ids: list[int] = []
        for text in (*"0123456789+=", "1\n"):
            ids += tokenizer(text, add_special_tokens=False).input_ids[-1:]
        if len(set(ids)) != 13 or len(tokenizer("1+2=3\n", add_special_tokens=False).input_ids) != 6:
            raise ValueError(f"digits, signs and the end of a line must be one token each; this tokenizer gives {ids}")
        self._digit, (self._plus, self._equals, self._end) = torch.tensor(ids[:10]), ids[10:]
        text = "".join(f"{a}+{b}={a + b}\n" for a, b in SHOTS)
        self._shots = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        self.prompt_len = len(self._shots) + 4

    def problems(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Prompts (count, prompt_len) and answers (count, 2), int64."""
        a, b = torch.randint(1, 10, (2, count), generator=generator)
        plus, equals = torch.full_like(a, self._plus), torch.full_like(a, self._equals)
        asked = torch.stack((self._digit[a], plus, self._digit[b], equals), 1)
        return torch.cat((self._shots.expand(count, -1), asked), 1), self._answers(a + b)

    def reward(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """1 for exactly the right tokens, else 0; (N,) float32."""
        a, b = ((prompts[:, at, None] == self._digit).long().argmax(1) for at in (-4, -2))
        return (answers == self._answers(a + b)).all(1).float()

    def _answers(self, sums: Tensor) -> Tensor:
        ones = self._digit[sums % 10]
        second = torch.where(sums >= 10, ones, torch.full_like(ones, self._end))
        return torch.stack((torch.where(sums >= 10, self._digit[sums // 10], ones), second), 1)


@torch.no_grad()
def spread(model: Decoder, seed: int = 0) -> None:
    """Move float32 parameters to random places of their bfloat16 rounding cells, in place; their cast stays.

    Of those at a power of two, whose cells are narrower below, a quarter stays where it is.
    """
    generator = torch.Generator().manual_seed(seed)
    for theta in model.parameters():
        cast = theta.bfloat16().float()
        moved = cast + (torch.rand(theta.shape, generator=generator) - 0.5) * ulp(cast)
        theta.copy_(torch.where(moved.bfloat16().float() == cast, moved, cast))


@dataclass(frozen=True)
class StreamState:
    """The bfloat16 weights after one step.

    Attributes:
        version: steps taken; 0 is the start.
        state: weights by name, tied ones shared.
        step: what the step did; None at the start.
    """

    version: int
    state: dict[str, Tensor]
    step: GrpoStep | None


def smollm2_stream(
    *,
    lr: float,
    storage: str,
    steps: int,
    loaded: tuple[Decoder, Any] | None = None,
    start: str = "spread",
    warmup_steps: int = 4,
    seed: int = 0,
) -> Iterator[StreamState]:
    """Train and yield the states one by one; about 10 s a step on one core, and 4 GB of memory.

    Args:
        lr: peak learning rate of AdamW (0.9, 0.999).
        storage: ``"fp32"`` masters, or ``"bf16"`` parameters.
        steps: how many; one state more is yielded.
        loaded: what :func:`~dist_lib.models.load_smollm2` gave, to load it once for several streams; not changed.
        start: ``"spread"`` puts float32 masters anywhere in their rounding cells, ``"loaded"`` leaves them.
        warmup_steps: of the learning rate.
        seed: of problems, answers and the spread.

    Raises:
        ValueError: another start.
        dist_lib.models.ModelMissing: the weights are not installed.
    """
    model, tokenizer = loaded or load_smollm2()
    config = GrpoConfig(lr=lr, storage=storage, warmup_steps=warmup_steps, prompts=4, samples=4, seed=seed)
    if start not in ("spread", "loaded"):
        raise ValueError(f"start = {start!r} must be spread or loaded")
    trainer = GrpoTrainer(model, FewShotSums(tokenizer), config)
    if start == "spread" and storage == "fp32":
        spread(trainer.model, seed)
    yield StreamState(0, trainer.weights(), None)
    for step in range(steps):
        batch = sample_rollouts(trainer.acting, trainer.task, config, step=step, version=step)
        done = trainer.step(batch)
        yield StreamState(step + 1, trainer.weights(), done)


def stream_folder(lr: float, storage: str, folder: Path = FOLDER, start: str = "spread") -> Path:
    """Where the stream of a learning rate, a storage and a start lies."""
    return folder / f"{storage}-{lr:g}{'' if start == 'spread' else '-' + start}"


def _save(content: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".part")
    torch.save(content, beside)
    os.replace(beside, path)


def write_difference(old: dict[str, Tensor], new: dict[str, Tensor], path: Path) -> None:
    """Write where the bits of two states of bfloat16 tensors differ, and the new bits there."""
    ties = find_ties(new)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in new:
        if name not in ties:
            x, y = as_words(old[name]), as_words(new[name])
            at = np.flatnonzero(x != y)
            found[name] = (torch.from_numpy(at.astype(np.int32)), torch.from_numpy(y[at].view(np.int16)))
    _save({"changes": found}, path)


def recorded_stream(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The states of a recorded stream in order, from the start on; each is a mapping with tensors of its own.

    Args:
        folder: of one stream, such as ``stream_folder(1e-6, "fp32")``.

    Raises:
        FileNotFoundError: nothing is recorded there; says the command that does it.
    """
    if not (folder / "start.pt").exists():
        raise FileNotFoundError(f"no stream is recorded in {folder}; run: python -m labs.pulse.stream")
    state: dict[str, Tensor] = torch.load(folder / "start.pt", weights_only=True)
    yield state
    for path in sorted(folder.glob("step-*.pt")):
        changes = torch.load(path, weights_only=True)["changes"]
        fresh = {n: state[n].clone() for n in changes}
        for name, (at, bits) in changes.items():
            fresh[name].view(torch.int16).view(-1)[at.long()] = bits
        ties = find_ties(state)
        state = {name: fresh[ties.get(name, name)] for name in state}
        yield state


def record(
    lr: float, storage: str, steps: int, folder: Path, loaded: tuple[Decoder, Any], start: str = "spread"
) -> list[dict[str, Any]]:
    """Record one stream; a stream that is there already is replaced. Returns what each step did."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.pt"):
        path.unlink()
    log: list[dict[str, Any]] = []
    previous: dict[str, Tensor] = {}
    for item in smollm2_stream(lr=lr, storage=storage, steps=steps, loaded=loaded, start=start):
        if item.step is None:
            _save(item.state, folder / "start.pt")
        else:
            write_difference(previous, item.state, folder / f"step-{item.version:04d}.pt")
            log.append({**vars(item.step), "density": total(count_changes(previous, item.state)).density})
            results.write_text(folder / "log.json", json.dumps(log, indent=1) + "\n")
        previous = item.state
    return log


def exponent_classes(old: dict[str, Tensor], new: dict[str, Tensor]) -> list[dict[str, int]]:
    """Cells and changed cells by the exponent byte of the old weight, over all tensors; empty classes left out."""
    cells, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
    ties = find_ties(new)
    for name in new:
        if name not in ties:
            x, y = as_words(old[name]), as_words(new[name])
            exponent = (x >> 7) & 255
            cells += np.bincount(exponent, minlength=256)
            changed += np.bincount(exponent[x != y], minlength=256)
    return [
        {"exponent": int(e) - 127, "cells": int(cells[e]), "changed": int(changed[e])} for e in np.flatnonzero(cells)
    ]


def summarise(folder: Path, distances: Sequence[int] = DISTANCES) -> dict[str, Any]:
    """What a recorded stream shows: S_k up to its end, density by tensor and layer, exponents and reference entropy."""
    kept: deque[dict[str, Tensor]] = deque(maxlen=max(distances) + 1)
    by_step = []
    for state in recorded_stream(folder):
        if kept:
            by_step.append(1 - total(count_changes(kept[-1], state)).density)
        kept.append(state)
    last, before = kept[-1], kept[-2]
    counts = count_changes(before, last)
    changed = total(counts).changed
    ties = find_ties(last)
    bits = sum(reference_bits(before[n], last[n]) for n in last if n not in ties)
    reach = [k for k in distances if k < len(kept)]
    return {
        "steps": len(by_step),
        "cells": total(counts).cells,
        "sparsity_by_step": by_step,
        "sparsity_to_end": {str(k): 1 - total(count_changes(kept[-1 - k], last)).density for k in reach},
        "density_by_tensor": {name: count.density for name, count in counts.items()},
        "density_by_layer": {name: count.density for name, count in by_layer(counts).items()},
        "exponents": exponent_classes(before, last),
        "changed": changed,
        "reference_bytes_per_change": bits / 8 / changed if changed else None,
        "log": json.loads((folder / "log.json").read_text()),
    }


def main(
    steps: Annotated[int, typer.Option(help="steps of each stream")] = 12,
    folder: Annotated[Path, typer.Option(help="where streams are written")] = FOLDER,
    out: Annotated[Path, typer.Option(help="summary to write")] = SUMMARY,
    only: Annotated[str, typer.Option(help="one stream, such as fp32-1e-06; the others' summary is kept")] = "",
    start: Annotated[str, typer.Option(help="where float32 masters start: spread or loaded")] = "spread",
    threads: Annotated[int, typer.Option(help="torch threads")] = 1,
) -> None:
    """Record the streams of both learning rates and both storages, and summarise them."""
    torch.set_num_threads(threads)
    console = Console()
    loaded = load_smollm2()
    for storage in STORAGES:
        for lr in RATES:
            where = stream_folder(lr, storage, folder, start)
            if only and where.name != only:
                continue
            log = record(lr, storage, steps, where, loaded, start)
            console.print(f"{where.name}: density of the last step {100 * log[-1]['density']:.3f} %", soft_wrap=True)
            content = json.loads(out.read_text()) if out.exists() else {}
            streams = {**content.get("streams", {}), where.name: {"lr": lr, "storage": storage, **summarise(where)}}
            note = "SmolLM2-135M, dequantised Q4_1; GRPO on one-digit sums, 4 prompts x 4 samples"
            found = {"what": note, "streams": streams, "hardware": results.hardware(), "versions": results.versions()}
            results.write_text(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
