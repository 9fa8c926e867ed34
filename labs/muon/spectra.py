"""Singular values of real momenta: a few gradient steps on the corpus, then one decomposition for each matrix.

``python -m labs.muon.spectra`` records them for SmolLM2-135M, whose weights not every reader has installed: the chapter
reads the record. :func:`momenta` is what the chapter runs itself on the small decoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from dist_lib import results
from dist_lib.models import Decoder, load_smollm2
from dist_lib.tasks import BatchSampler, load_corpus

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "muon-smollm2-spectra.json"
COMMAND = "python -m labs.muon.spectra"
LAYER = 15  # of 30
MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def momenta(
    model: Decoder, batches: BatchSampler, *, steps: int = 10, beta: float = 0.95, lr: float = 0.02
) -> tuple[dict[str, Tensor], list[float]]:
    """Heavy-ball momentum of every hidden matrix after a few plain gradient steps, and the loss of each step."""
    names = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}
    buffers = {n: torch.zeros_like(p) for n, p in names.items()}
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = model.loss(*batches.batch(step))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for n, p in names.items():
                if p.grad is not None:
                    buffers[n].mul_(beta).add_(p.grad)
                p.sub_(buffers[n], alpha=lr)
    return buffers, losses


def spectrum(matrix: Tensor) -> Tensor:
    """Singular values, largest first, as shares of the Frobenius norm: what Newton-Schulz sees of a matrix."""
    values: Tensor = torch.linalg.svdvals(matrix)
    return values.div(values.norm())


def record(model: Decoder, tokens: Tensor, names: Sequence[str], *, seed: int, **settings: Any) -> dict[str, Any]:
    """Spectra of the named matrices of a model, with everything needed to compute them again."""
    sizes = {"batch_size": 4, "seq_len": 128}
    chosen: dict[str, Any] = {"steps": 10, "beta": 0.95, "lr": 1e-3} | settings
    buffers, losses = momenta(model, BatchSampler(tokens, **sizes, seed=seed), **chosen)
    return {
        "command": COMMAND,
        "seed": seed,
        "settings": chosen | sizes,
        "loss": [round(x, 3) for x in losses],
        "spectra": {name: [float(f"{v:.4g}") for v in spectrum(buffers[name]).tolist()] for name in names},
        "hardware": results.hardware(),
        "versions": results.versions(),
    }


def main(out: Annotated[Path, typer.Option(help="file to write")] = RECORD, seed: int = 0) -> None:
    """Take a few steps with SmolLM2-135M on the corpus and write the spectra of four of its momenta."""
    torch.set_num_threads(1)
    console = Console()
    model, tokenizer = load_smollm2()
    text = bytes(load_corpus().train[:400_000].tolist()).decode("utf-8", errors="replace")
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    found = record(model, tokens, [f"layers.{LAYER}.{name}.weight" for name in MATRICES], seed=seed)
    found = {"model": "SmolLM2-135M-Instruct, 4-bit weights dequantised to float32"} | found
    results.write_text(out, json.dumps(found, indent=None, separators=(",", ":")).replace('],"', '],\n"') + "\n")
    console.print(f"loss {found['loss'][0]} to {found['loss'][-1]} nats a token; written to {out}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
