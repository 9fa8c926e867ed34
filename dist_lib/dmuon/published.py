"""Times that others published for DMuon and its baselines, as they stand in their sources. Milliseconds.

``"paper, table 1"`` is arXiv 2606.27153v1 (256 A800 GPUs); ``"repository"`` is the history of the authors' repository
(8 A800 GPUs, bf16; replays run the matrix updates alone). Nothing here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quantity = Literal["optimizer", "step"]
System = Literal["adamw", "gather", "ddp", "dmuon", "naive-replay", "owned-replay"]


@dataclass(frozen=True)
class Published:
    """One number.

    Attributes:
        model: name of a workload of ours.
        label: name in the source.
        world: number of GPUs.
        system: ``"gather"`` gathers gradients and updates on every rank; ``"ddp"`` updates on every rank.
        quantity: of the optimizer, or of the whole step.
        milliseconds: as published.
        source: where.
    """

    model: str
    label: str
    world: int
    system: System
    quantity: Quantity
    milliseconds: float
    source: str


def _table_1(model: str, label: str, steps: tuple[int, int, int], optimizers: tuple[int, int]) -> list[Published]:
    source = "paper, table 1"
    systems: tuple[System, System, System] = ("dmuon", "gather", "adamw")
    found = [Published(model, label, 256, s, "step", t, source) for s, t in zip(systems, steps, strict=True)]
    both = zip(systems[:2], optimizers, strict=True)
    return found + [Published(model, label, 256, s, "optimizer", t, source) for s, t in both]


def _eight(model: str, label: str, *times: tuple[System, float], kind: str = "repository") -> list[Published]:
    return [Published(model, label, 8, system, "optimizer", t, kind) for system, t in times]


PUBLISHED: tuple[Published, ...] = (
    *_eight("qwen2.5-1.5b", "Qwen2.5-1.5B", ("adamw", 17), ("gather", 373), ("dmuon", 31), ("ddp", 321)),
    *_eight("llama3.2-3b", "Llama-3.2-3B", ("adamw", 27), ("gather", 1232), ("dmuon", 99), ("ddp", 1109)),
    *_eight("qwen2.5-7b", "Qwen2.5-7B", ("adamw", 53), ("gather", 2917), ("dmuon", 189)),
    *_eight("llama3-8b", "Llama-3.1-8B", ("adamw", 56), ("gather", 3468), ("dmuon", 260)),
    *_eight("wallx", "WallX", ("naive-replay", 1135), ("owned-replay", 92), kind="repository, replay"),
    *_eight("pi0", "Pi0", ("naive-replay", 750), ("owned-replay", 61), kind="repository, replay"),
    *_table_1("wallx", "Wall-OSS", (1519, 2857, 1496), (18, 1977)),
    *_table_1("pi0", "Pi0", (1648, 2665, 1637), (14, 1308)),
    *_table_1("qwen2.5-7b", "Qwen2.5-7B", (2850, 6219, 2844), (22, 3604)),
)


@dataclass(frozen=True)
class PrintedRow:
    """A row of the paper's table 1 with the ratios that it prints.

    Attributes:
        label: workload.
        dmuon_ms, gather_ms, adamw_ms: steps.
        speedup: printed, gather over DMuon.
        dmuon_optimizer_ms, gather_optimizer_ms: optimizers.
        optimizer_speedup: printed.
        overhead: printed, DMuon's step over AdamW's, less one.
    """

    label: str
    dmuon_ms: float
    gather_ms: float
    adamw_ms: float
    speedup: float
    dmuon_optimizer_ms: float
    gather_optimizer_ms: float
    optimizer_speedup: float
    overhead: float

    def slips(self) -> tuple[str, ...]:
        """What does not follow from the row's own numbers, rounding allowed for."""
        found = []
        low = (self.gather_optimizer_ms - 0.5) / (self.dmuon_optimizer_ms + 0.5)
        high = (self.gather_optimizer_ms + 0.5) / (self.dmuon_optimizer_ms - 0.5)
        divided = self.gather_optimizer_ms / self.dmuon_optimizer_ms
        if not low <= self.optimizer_speedup <= high:
            implied = self.gather_optimizer_ms / self.optimizer_speedup
            found.append(f"optimizer {self.optimizer_speedup} printed, {divided:.2f} divided: {implied:.2f} ms implied")
        overhead = self.dmuon_ms / self.adamw_ms - 1
        slack = 1.01 / self.adamw_ms + 0.0005
        if abs(overhead - self.overhead) > slack:
            found.append(f"overhead {self.overhead:.1%} printed, {overhead:.1%} divided")
        if abs(self.gather_ms / self.dmuon_ms - self.speedup) > 0.006:
            found.append(f"speed-up {self.speedup} printed, {self.gather_ms / self.dmuon_ms:.2f} divided")
        return tuple(found)


TABLE_1: tuple[PrintedRow, ...] = (
    PrintedRow("Wall-OSS", 1519, 2857, 1496, 1.88, 18, 1977, 109.44, 0.015),
    PrintedRow("Pi0", 1648, 2665, 1637, 1.62, 14, 1308, 93.43, 0.012),
    PrintedRow("Wall-WM", 3011, 9061, 2915, 3.01, 64, 6265, 96.89, 0.033),
    PrintedRow("Qwen2.5-7B", 2850, 6219, 2844, 2.18, 22, 3604, 163.82, 0.002),
)
# Table 2, Wall-OSS on 128 GPUs: printed shares of the gain in the optimizer's time. They leave 4 % unexplained.
GAIN_SHARES = {"symmetric kernel": 0.48, "owners and balance": 0.32, "tuning and batches": 0.16}
HEADLINE_OPTIMIZER_SPEEDUP = 163.00  # the abstract; table 1 has 163.82

# The authors' A800 times of one Gram Newton-Schulz with symmetric kernels, seconds (repository's history).
A800_TIMES: dict[tuple[int, ...], float] = {
    (2048, 2048): 1647e-6,  # the plain product is faster here
    (2048, 8192): 2531e-6,
    (2048, 11_008): 3011e-6,
    (3072, 3072): 3476e-6,
    (3072, 8192): 5014e-6,
    (3584, 3584): 5280e-6,
    (3584, 18_944): 11_216e-6,
    (4096, 4096): 7453e-6,
    (4096, 14_336): 12_730e-6,
    (5120, 5120): 14_127e-6,
    (5120, 13_824): 20_508e-6,
    (7168, 7168): 36_723e-6,
    (7168, 18_432): 52_255e-6,
}
