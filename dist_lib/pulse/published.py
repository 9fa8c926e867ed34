"""Published measurements that the book sets its own beside: sparsity over k, and sizes of coded patches.

The numbers are aggregates of the raw measurement files that the authors keep in the history of their public repository
(https://github.com/one-covenant/grail, branch ``research/sparsity``, commits ``5f17bda`` and ``2ddb67d``): means over
steps and seeds. The files are the authors' own; which table of the paper (arXiv:2602.03839) they became is not
recorded, and the script that made them stored parameters in bfloat16. Nothing here is measured by this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PUBLISHED_KS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class SparsityCurve:
    """Mean sparsity of one published setting.

    Attributes:
        model: as the authors name it.
        lr: learning rate.
        updates: optimizer steps for each batch of rollouts.
        values: S_k in percent for each k of ``PUBLISHED_KS``.
        lowest: the worst single step of any seed, S_1 in percent.
    """

    model: str
    lr: float
    updates: int
    values: tuple[float, ...]
    lowest: float

    @property
    def label(self) -> str:
        """Short name for a legend."""
        reuse = f", {self.updates} updates a batch" if self.updates > 1 else ""
        return f"{self.model}, lr {self.lr:.0e}{reuse}".replace("e-0", "e-")


PUBLISHED: Sequence[SparsityCurve] = (
    SparsityCurve("Qwen2.5-7B", 3e-6, 1, (99.14, 99.01, 98.83, 98.60, 98.34, 98.04), 98.52),
    SparsityCurve("Qwen2.5-0.5B", 3e-6, 1, (99.26, 99.14, 99.00, 98.81, 98.59, 98.35), 98.12),
    SparsityCurve("Qwen2.5-1.5B", 5e-7, 1, (99.80, 99.79, 99.78, 99.75, 99.73, 99.70), 99.68),
    SparsityCurve("Qwen2.5-1.5B", 1e-6, 1, (99.73, 99.71, 99.68, 99.63, 99.58, 99.53), 99.39),
    SparsityCurve("Qwen2.5-1.5B", 3e-6, 1, (99.43, 99.34, 99.24, 99.10, 98.94, 98.77), 98.48),
    SparsityCurve("Qwen2.5-1.5B", 5e-6, 1, (99.06, 98.91, 98.71, 98.47, 98.18, 97.86), 98.14),
    SparsityCurve("Qwen2.5-1.5B", 3e-6, 8, (98.97, 98.89, 98.76, 98.56, 98.28, 97.95), 98.39),
    SparsityCurve("Qwen2.5-1.5B", 3e-6, 32, (98.65, 98.58, 98.46, 98.26, 97.98, 97.62), 98.04),
    SparsityCurve("Llama-3.2-3B", 3e-6, 1, (99.13, 98.98, 98.81, 98.59, 98.33, 98.05), 98.20),
    SparsityCurve("Gemma-3-1B", 3e-6, 1, (99.15, 99.01, 98.83, 98.60, 98.32, 97.98), 98.60),
    SparsityCurve("Gemma-3-4B", 3e-6, 1, (98.93, 98.74, 98.51, 98.22, 97.87, 97.48), 98.31),
)


@dataclass(frozen=True)
class CodedPatch:
    """One patch of a 7B model as the authors' codec wrote it.

    Attributes:
        window: which patch.
        density: share of changed cells.
        compressor: of the coded bytes.
        nbytes: of the patch.
        encode_s, decode_s: seconds on the authors' machine.
    """

    window: str
    density: float
    compressor: str
    nbytes: float
    encode_s: float
    decode_s: float

    def full_ratio(self, cells: float) -> float:
        """Bytes of all ``cells`` in bfloat16 over those of the patch."""
        return 2 * cells / self.nbytes


CELLS_7B = 7.6155e9
CODED: Sequence[CodedPatch] = (
    CodedPatch("A", 0.00773, "zstd-1", 170.0e6, 0.52, 0.38),
    CodedPatch("A", 0.00773, "zstd-3", 168.9e6, 1.61, 0.48),
    CodedPatch("A", 0.00773, "lz4", 241.9e6, 0.53, 0.40),
    CodedPatch("A", 0.00773, "snappy", 241.4e6, 0.41, 0.41),
    CodedPatch("B", 0.00828, "zstd-1", 181.0e6, 0.55, 0.40),
)
