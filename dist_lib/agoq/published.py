"""What the AGoQ paper (arXiv 2605.00539) prints about memory and time, and what in it does not fit together.

Numbers as they stand in its tables, with their place; nothing here is ours. GB are 10^9 bytes where the paper says GB;
MB are as printed. All are single runs: no seeds or intervals are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Stage = Literal["bf16", "o", "og", "aog"]  # 8-bit optimizer state, 8-bit gradients, encoded activations; added in turn

COLUMNS = ("QKV", "Attention", "Linear", "RMSNorm", "FFN1", "Act func", "FFN2")
TABLE_1: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "bf16": (1, 5, 1, 4, 1, 12, 4),
        "coat": (1, 5, 1, 1, 0.5, 6, 2),
        "table1": (0, 5, 0.25, 0.5, 0, 2, 0),
    }
)
"""Table 1: U by column of :data:`COLUMNS`, for a layout of :data:`~dist_lib.agoq.layer_memory.LAYOUTS`."""
TABLE_1_TOTALS: Mapping[str, float] = MappingProxyType({"bf16": 28.0, "coat": 16.5, "table1": 7.75})


@dataclass(frozen=True)
class SpeedRow:
    """A row of table 2: LLaMA2-13B, 64 GPUs, 4 stages, tensor parallel over 8; a stage has 10 layers.

    Attributes:
        seq: tokens.
        megatron_ms, zero1_ms, agoq_ms: an iteration.
        megatron_recomputed, zero1_recomputed: layers of a stage that are computed again; AGoQ: none.
        speedup, zero1_speedup: printed.
    """

    seq: int
    megatron_ms: float
    megatron_recomputed: int
    zero1_ms: float
    zero1_recomputed: int
    agoq_ms: float
    speedup: float
    zero1_speedup: float


TABLE_2: tuple[SpeedRow, ...] = (
    SpeedRow(32 * 1024, 37_635, 3, 37_038, 2, 36_568, 1.03, 1.01),
    SpeedRow(40 * 1024, 51_922, 4, 51_418, 4, 45_590, 1.14, 1.13),
    SpeedRow(48 * 1024, 67_932, 6, 67_928, 6, 57_047, 1.19, 1.19),
    SpeedRow(56 * 1024, 88_200, 8, 86_601, 8, 69_544, 1.27, 1.25),
    SpeedRow(64 * 1024, 104_444, 8, 103_706, 8, 82_519, 1.27, 1.26),
    SpeedRow(72 * 1024, 128_085, 10, 128_152, 10, 97_615, 1.31, 1.31),
    SpeedRow(80 * 1024, 149_667, 10, 149_288, 10, 111_422, 1.34, 1.34),
)

STEPS = ("norm", "gather", "attention", "scatter", "norm", "gather", "FFN", "scatter")


@dataclass(frozen=True)
class LayerTimes:
    """One pass of one layer, from table 5 (forward) or 6 (backward): milliseconds of each of :data:`STEPS`."""

    baseline_ms: tuple[float, ...]
    agoq_ms: tuple[float, ...]
    baseline_total_ms: float
    agoq_total_ms: float


TABLE_5 = LayerTimes(
    (1.3, 17.02, 19.34, 21.79, 1.3, 17, 13.3, 23.01), (1.3, 16.82, 20.62, 21.65, 1.3, 17, 15.64, 21.78), 114.06, 116.11
)
TABLE_6 = LayerTimes(
    (2.85, 23.21, 45.06, 35.4, 3.2, 22.62, 28.6, 34),
    (2.9, 22.82, 47.86, 34.56, 3.4, 22.58, 32.54, 33.54),
    194.94,
    200.2,
)


@dataclass(frozen=True)
class MemoryRow:
    """One published peak.

    Attributes:
        place: where it stands, and on what.
        model: name of a configuration of ours.
        layers: of the model, which the paper shortens.
        seq: tokens.
        systems: what is switched on.
        gigabytes: as published.
        note: what the paper leaves open.
    """

    place: str
    model: str
    layers: int
    seq: int
    systems: Stage
    gigabytes: float
    note: str = ""


def _rows(place: str, model: str, layers: int, seq: int, note: str = "", **values: float) -> tuple[MemoryRow, ...]:
    return tuple(MemoryRow(place, model, layers, seq, s, v, note) for s, v in values.items())  # type: ignore[arg-type]


_OPEN = "tensor parallelism is not stated; 8 assumed"
TABLE_8: tuple[MemoryRow, ...] = (
    *_rows("table 8, GPU", "llama2-13b", 40, 12 * 1024, bf16=46.1, o=37.7, og=35.3, aog=22.3),
    *_rows("table 8, NPU", "llama2-13b", 40, 12 * 1024, bf16=55.2, o=45.3, og=40.5, aog=29.7),
)
TABLE_14: tuple[MemoryRow, ...] = (
    *_rows("table 14, 32K", "llama3-8b", 36, 32 * 1024, _OPEN, bf16=48.606, aog=16.594),
    *_rows("table 14, 64K", "llama3-8b", 16, 64 * 1024, _OPEN, bf16=46.681, aog=19.267),
)
TABLE_14_SAVED: Mapping[str, float] = MappingProxyType({"table 14, 32K": 0.66, "table 14, 64K": 0.59})
HEADLINE_SAVED, TEXT_SAVED = 0.52, 0.53
"""The abstract's saving, and the one that the text gives for the same rows of table 8."""


@dataclass(frozen=True)
class Inconsistency:
    """Something that the paper says twice, or that its own numbers contradict.

    Attributes:
        place: where.
        printed: what it says.
        found: what follows from the rest.
    """

    place: str
    printed: str
    found: str


INCONSISTENCIES: tuple[Inconsistency, ...] = (
    Inconsistency(
        "in-flight micro-batches of stage i",
        "n + 2 i - 1",
        "counts stages from the last: from the first it is 3 n - 2 i + 1, for two chunks a stage; the figure has it so",
    ),
    Inconsistency(
        "bits of stage i",
        "4 N_1 / N_i, no rounding given",
        "4, 5, 6, 8 in the figure are 4, 4.89, 6.29, 8.8 rounded to the nearest and cut off at 8; the second stage's "
        "codes then take 45/44 of the first's",
    ),
    Inconsistency(
        "table 1, Linear",
        "the out-projection's input falls from 1 U to 0.25 U",
        "attention's backward pass needs the same tensor at 16 bits, so 1 U stays: 8.75 U, not 7.75 U, unless the "
        "projection uses attention's own",
    ),
    Inconsistency("table 1", "28 U to 7.75 U", "scales are not counted: 0.17 U more with float32 and blocks of 128"),
    Inconsistency(
        "table 1",
        "one shape for all models: MLP 4 times as wide, as many key and value heads as query heads",
        "LLaMA2-13B is 2.7 times as wide (3.2 times less instead of 3.6), LLaMA3-8B has a quarter of the heads (4.5)",
    ),
    Inconsistency(
        "table 2, 1.34",
        "faster by quantisation",
        "the baseline computes all 10 layers of a stage again, which is 1 + 0.369 of the time: divided by the paper's "
        "own overhead of 1.024 that is 1.337",
    ),
    Inconsistency("abstract and table 8", "52 % and 53 % saved", "46.1 to 22.3 GB are 51.6 %"),
    Inconsistency(
        "abstract and table 8",
        "saved by quantising activations and gradients",
        "8.4 of the 23.8 GB are an 8-bit Adam that is not the paper's",
    ),
    Inconsistency(
        "table 8, GPU, gradients",
        "2.4 GB saved by 8-bit gradients",
        "3 bytes for each of 1.6 billion parameters of a rank are 4.9 GB, as on the NPU (4.8); no cause is given",
    ),
    Inconsistency(
        "table 4, 2^30 elements at 10 Gb/s",
        "226.58 ms for the all-gather",
        "its all-to-all of as many bytes takes 7297.73 ms, and the all-gather of a 32nd of them 197.92",
    ),
    Inconsistency(
        "table 7",
        "samples a second",
        "the speed-ups of 1.33 and 1.16 that the text quotes follow only if the numbers are milliseconds",
    ),
    Inconsistency("table 3", "31 % less memory than COAT", "94 100 to 66 852 MB are 29 %"),
    Inconsistency("abstract", "32B", "the largest model in the tables is CodeLLaMA-34B"),
)
