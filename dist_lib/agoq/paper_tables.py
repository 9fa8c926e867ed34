"""The AGoQ paper's tables of memory from model configurations, each number beside the printed one with its error.

Tables 1, 8 and 14 and the recomputed layers of table 2 (arXiv 2605.00539), from :mod:`dist_lib.agoq.memory_model`. The
published peaks contain what the model leaves out (fragments, workspaces, buffers, the runtime); what a technique saves
is the sharper comparison. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from dist_lib.agoq.layer_memory import TABLE_1_SHAPE, LayerShape, Layout, by_column
from dist_lib.agoq.memory_model import SYSTEMS, System, Training, fewest_recomputed, peak, stage_memory
from dist_lib.agoq.published import COLUMNS, TABLE_1, TABLE_2, TABLE_8, TABLE_14, MemoryRow, SpeedRow
from dist_lib.agoq.speed_model import STAGE_LAYERS, published_speed
from dist_lib.models import get_config

TENSOR = 8  # of tables 2 and 8; assumed for table 14
A6000 = 46 * 2**30  # of 48 GiB; 2 GiB for the runtime are assumed
SAVINGS = {"O": ("bf16", "o"), "G": ("o", "og"), "A": ("og", "aog"), "all": ("bf16", "aog")}


@dataclass(frozen=True)
class LayerResult:
    """A column of table 1.

    Attributes:
        layout: key of the table.
        column: of the table.
        published: U.
        counted: U of the tensors in that column.
    """

    layout: Layout
    column: str
    published: float
    counted: Fraction

    @property
    def error(self) -> float:
        """Counted less published, U."""
        return float(self.counted) - self.published


def layer_table() -> tuple[LayerResult, ...]:
    """Table 1, column by column, from the tensors of each layout."""
    layouts: tuple[Layout, ...] = ("bf16", "coat", "table1")
    rows = []
    for layout in layouts:
        counted = by_column(layout, TABLE_1_SHAPE)
        columns = zip(COLUMNS, TABLE_1[layout], strict=True)
        rows += [LayerResult(layout, column, printed, counted[column]) for column, printed in columns]
    return tuple(rows)


@dataclass(frozen=True)
class MemoryResult:
    """A published peak with ours, GB.

    Attributes:
        row: as published.
        modelled: with the model's own shape, activations as table 1 counts them.
        table_1_shape: with the shape that table 1 assumes for every model.
        built: with the model's shape and everything that the paper's layout has to keep, scales and statistics
            included; the same as ``modelled`` where nothing is encoded.
    """

    row: MemoryRow
    modelled: float
    table_1_shape: float
    built: float

    @property
    def error(self) -> float:
        """Modelled over published, less one."""
        return self.modelled / self.row.gigabytes - 1


def _training(row: MemoryRow, shape: LayerShape | None = None) -> Training:
    config = replace(get_config(row.model), n_layers=row.layers)
    return Training(config=config, seq=row.seq, tensor=TENSOR, shape=shape)


def _peak(row: MemoryRow, system: System, shape: LayerShape | None = None) -> float:
    return peak(stage_memory(_training(row, shape), system)).total / 1e9


def memory_table(rows: Iterable[MemoryRow] = (*TABLE_8, *TABLE_14)) -> tuple[MemoryResult, ...]:
    """Tables 8 and 14 from configurations."""
    as_printed = replace(SYSTEMS["paper"], layout="table1", count_scales=False)
    found = []
    for row in rows:
        system = as_printed if row.systems == "aog" else SYSTEMS[row.systems]
        built = SYSTEMS["paper"] if row.systems == "aog" else system
        found.append(MemoryResult(row, _peak(row, system), _peak(row, system, TABLE_1_SHAPE), _peak(row, built)))
    return tuple(found)


@dataclass(frozen=True)
class SavingResult:
    """What one technique saves between two rows of a table, GB.

    Attributes:
        place: of the rows.
        technique: 8-bit Adam ``O``, 8-bit gradients ``G``, encoded activations ``A``, or ``all``.
        published, modelled, table_1_shape: as in :class:`MemoryResult`.
        published_share, modelled_share: of the first row.
    """

    place: str
    technique: str
    published: float
    modelled: float
    table_1_shape: float
    published_share: float
    modelled_share: float

    @property
    def error(self) -> float:
        """Modelled over published, less one."""
        return self.modelled / self.published - 1


def saving_table(results: Iterable[MemoryResult] | None = None) -> tuple[SavingResult, ...]:
    """What each technique saves, where a table has the row before and the row after."""
    by_place: dict[str, dict[str, MemoryResult]] = {}
    for result in memory_table() if results is None else results:
        by_place.setdefault(result.row.place, {})[result.row.systems] = result
    found = []
    for place, rows in by_place.items():
        for technique, (first, second) in SAVINGS.items():
            if first in rows and second in rows:
                a, b = rows[first], rows[second]
                printed, ours = a.row.gigabytes - b.row.gigabytes, a.modelled - b.modelled
                wide = a.table_1_shape - b.table_1_shape
                shares = printed / a.row.gigabytes, ours / a.modelled
                found.append(SavingResult(place, technique, printed, ours, wide, *shares))
    return tuple(found)


@dataclass(frozen=True)
class RecomputeResult:
    """A row of table 2 from memory alone: how many layers have to be computed again, and the speed-up that follows.

    Attributes:
        row: as published.
        recomputed: the fewest layers of a stage with which the baseline fits; None: it does not.
        agoq_gb: peak of AGoQ with nothing recomputed.
        speedup: from ``recomputed``.
    """

    row: SpeedRow
    recomputed: int | None
    agoq_gb: float
    speedup: float

    @property
    def error(self) -> float:
        """Speed-up over the published one, less one."""
        return self.speedup / (self.row.megatron_ms / self.row.agoq_ms) - 1


def recompute_table(capacity: int = A6000, *, chunks: int = 2) -> tuple[RecomputeResult, ...]:
    """Predict table 2 from a model's configuration, a GPU's memory and one layer's times.

    Args:
        capacity: bytes of a GPU; default: 46 of an A6000's 48 GiB.
        chunks: on a stage; the paper does not say for this table, its figure of stages has 2.
    """
    config, speed, found = get_config("llama2-13b"), published_speed(), []
    for row in TABLE_2:
        t = Training(config=config, seq=row.seq, tensor=TENSOR, stages=4, data=2, micro_batches=8, chunks=chunks)
        recomputed = fewest_recomputed(t, SYSTEMS["bf16"], capacity)
        held = peak(stage_memory(t, SYSTEMS["paper"])).total / 1e9
        faster = speed.speedup(STAGE_LAYERS if recomputed is None else recomputed, STAGE_LAYERS)
        found.append(RecomputeResult(row, recomputed, held, faster))
    return tuple(found)
