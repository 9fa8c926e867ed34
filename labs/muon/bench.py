"""Time ratios of Newton-Schulz and of Muon's step against their baselines."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from dist_lib.models import DecoderConfig
from dist_lib.models.decoder import DecoderLayer
from dist_lib.ops import newton_schulz
from dist_lib.optim import Muon
from labs.bench import Pair, Row

LAYER = DecoderConfig(vocab_size=256, d_model=576, n_layers=1, n_heads=9, n_kv_heads=3, d_ff=1536, max_seq_len=64)


def _processor_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    words = set(path.read_text(encoding="utf-8", errors="replace").split()) if path.exists() else set()
    return words if "flags" in words else set()


def has_native_bf16() -> bool:
    """Whether the x86 processor multiplies bfloat16 itself; False where that cannot be told."""
    return bool(_processor_flags() & {"avx512_bf16", "amx_bf16"})


def lacks_native_bf16() -> bool:
    """Whether there is no GPU and an x86 processor without bfloat16 products; False where that cannot be told."""
    return not torch.cuda.is_available() and bool(_processor_flags()) and not has_native_bf16()


def _layer_step() -> Pair:
    """One step of all seven matrices of a layer, by ours and by torch's Muon, from the same gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def parameters() -> list[torch.nn.Parameter]:
        kept = [p for p in DecoderLayer(LAYER).to(device).parameters() if p.ndim == 2]
        for p in kept:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(device)
        return kept

    ours, baseline = Muon(parameters(), lr=1e-4), torch.optim.Muon(parameters(), lr=1e-4)

    def timed(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return Pair(lambda: timed(ours), lambda: timed(baseline))


MUON_STEP = Row(
    name="muon-step",
    what="Muon step of one LLaMA-like layer, d = 576 (7 matrices)",
    baseline="torch.optim.Muon, which iterates in bfloat16",
    target=0.1 if lacks_native_bf16() else None,
    make=_layer_step,
)


@contextmanager
def _in_process_without_bf16() -> Iterator[Pair]:
    """The same pair in a process whose oneDNN may use AVX2 at most, as on older processors."""
    command = [sys.executable, "-m", "labs.muon.bench"]
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    with subprocess.Popen(
        command, env={**os.environ, **limits}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def timed(which: str) -> float:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process that takes the times has no pipes")
            process.stdin.write(which + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that takes the times ended with code {process.wait()}")
            return float(answer)

        try:
            yield Pair(lambda: timed("ours"), lambda: timed("baseline"), seconds=True)
        finally:
            process.kill()


def serve() -> None:
    """Answer each line of standard input, ``ours`` or ``baseline``, with the seconds of one step."""
    torch.set_num_threads(1)
    pair = _layer_step()
    for line in sys.stdin:
        begin = time.perf_counter()
        (pair.ours if line.strip() == "ours" else pair.baseline)()
        sys.stdout.write(f"{time.perf_counter() - begin}\n")
        sys.stdout.flush()


def _already_measured() -> str:
    if torch.cuda.is_available() or not has_native_bf16():
        return "only for a CPU that has bfloat16 products: elsewhere the row muon-step says it"
    return ""


MUON_STEP_AVX2 = Row(
    name="muon-step-without-bf16",
    what="the same step on this CPU without its bfloat16 products (oneDNN limited to AVX2)",
    baseline=MUON_STEP.baseline,
    target=0.1,
    make=_in_process_without_bf16,
    why_not=_already_measured,
)


def _forms() -> Pair:
    """The Gram form and the direct form of one float32 matrix, wide by four."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)).to(device)

    def timed(form: Literal["gram", "direct"]) -> None:
        newton_schulz(x, form=form, compute_dtype=torch.float32)
        if device == "cuda":
            torch.cuda.synchronize()

    return Pair(lambda: timed("gram"), lambda: timed("direct"))


FORMS = Row(
    name="newton-schulz",
    what="Newton-Schulz 512 x 2048, float32, Gram form",
    baseline="the direct form",
    target=0.75,
    make=_forms,
)

ROWS = (FORMS, MUON_STEP, MUON_STEP_AVX2)

if __name__ == "__main__":
    description = "Times one optimizer step for each line of standard input; a helper of `python -m labs bench muon`."
    argparse.ArgumentParser(prog="python -m labs.muon.bench", description=description).parse_args()
    serve()
