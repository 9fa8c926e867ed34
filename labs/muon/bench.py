"""Time ratios of Newton-Schulz and of Muon's step against their baselines."""

from __future__ import annotations

from pathlib import Path

import torch

from dist_lib.models import DecoderConfig
from dist_lib.models.decoder import DecoderLayer
from dist_lib.optim import Muon
from labs.bench import Pair, Row

LAYER = DecoderConfig(vocab_size=256, d_model=576, n_layers=1, n_heads=9, n_kv_heads=3, d_ff=1536, max_seq_len=64)


def lacks_native_bf16() -> bool:
    """Whether this machine computes without a GPU and its processor has no bfloat16 products; unknown counts as no."""
    flags = Path("/proc/cpuinfo")
    if torch.cuda.is_available() or not flags.exists():
        return False
    words = set(flags.read_text(encoding="utf-8", errors="replace").split())
    return "flags" in words and not words & {"avx512_bf16", "amx_bf16", "bf16"}


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

ROWS = (MUON_STEP,)
