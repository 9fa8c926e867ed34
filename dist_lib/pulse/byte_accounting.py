"""Where the bytes of a patch go: positions, values and the rest, codec by codec, down to the reference entropy.

The parts of a codec add up to what ``encode_segment`` writes. Where one compressor covers
positions and values, the positions' share is what they take alone and the values' share is what is left. Layouts that
are no codec here (plain indices, a bit mask) are coded as plainly as they are described, each with one zstd-1 frame.
Needs the packages of ``dist-lib[pulse]``; the figure needs ``dist-lib[viz]`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse.codecs import CODECS, Change, Place, encode_change, find_changes, kernels
from dist_lib.pulse.sparsity_measures import reference_bits
from dist_lib.pulse.state import TensorSpec, as_words
from dist_lib.pulse.streams import adamw_stream
from dist_lib.pulse.wire import Reader, Words, pack, planes, zigzag

SETTLED = 30
"""Step of a stream that is looked at: Adam's second moment has settled by then."""
CELLS = 1 << 21
ROW = 4096


@dataclass(frozen=True)
class Bytes:
    """Bytes of one segment's changes in one form.

    Attributes:
        name: of the codec or layout.
        changed: cells that changed.
        index, value, header: bytes of positions, of values, and of everything else (counts, classes, tables).
    """

    name: str
    changed: int
    index: float
    value: float
    header: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.index + self.value + self.header

    @property
    def per_change(self) -> float:
        """Bytes for each changed cell."""
        return self.total / self.changed


def settled_pair(storage: str, lr: float, *, cells: int = CELLS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two states of a synthetic AdamW stream one step apart, bfloat16 (rows, 4096), at step 30.

    Args:
        storage: ``"bf16"`` or ``"fp32"``, see ``adamw_stream``.
        lr: learning rate.
        cells: number of weights, a multiple of 4096 and at most 2^22.
        seed: of the stream.
    """
    *_, last = adamw_stream(cells, lr=lr, steps=SETTLED, storage=storage, seed=seed)
    return last.old.view(-1, ROW), last.new.view(-1, ROW)


def _segment(old: Tensor, new: Tensor) -> tuple[Words, Change, Place]:
    words = as_words(old)
    return words, find_changes(words, as_words(new)), Place(TensorSpec(torch.bfloat16, tuple(old.shape)), 0)


def account(old: Tensor, new: Tensor, codec: str) -> Bytes:
    """The parts of what a codec writes for one bfloat16 tensor of at most 2^22 cells.

    Args:
        old, new: of one shape, with at least one change.
        codec: ``"paper"``, ``"fast"`` or ``"small"``.

    Raises:
        ValueError: an unknown codec, or nothing changed.
    """
    if codec not in CODECS:
        raise ValueError(f"there is no codec {codec!r}; choose one of {', '.join(CODECS)}")
    words, change, place = _segment(old, new)
    count = change.positions.size
    if count == 0:
        raise ValueError("nothing changed, so there are no bytes to account for")
    data = encode_change(CODECS[codec], words, change, place)
    if codec == "small":
        return _account_small(data, words, change)
    if codec == "paper":
        rows, columns = np.divmod(change.positions.astype(np.int64), place.row)
        turn = np.diff(rows, prepend=-1) > 0
        steps = np.where(turn, columns, np.diff(columns, prepend=0))
        down = np.diff(rows, prepend=0)
        narrow = (
            down.astype(np.min_scalar_type(int(down.max()))),
            steps.astype("<u2" if place.row <= 1 << 16 else "<u4"),
        )
        index = pack(b"".join(a.tobytes() for a in narrow))
    else:
        gaps, escapes = np.empty(count, np.uint8), np.empty(5 * (change.cells // 255 + 1), np.uint8)
        used = kernels().gap_pack(change.positions, gaps, escapes)
        index = pack(gaps.tobytes() + escapes[:used].tobytes())
    frame = data.index(b"\x28\xb5\x2f\xfd")  # where the compressor begins
    return Bytes(codec, count, len(index), len(data) - frame - len(index), frame)


def _account_small(data: bytes, words: Words, change: Change) -> Bytes:
    from dist_lib.pulse import _rans, _small_kernels, _small_plan
    from dist_lib.pulse import _small_codec as small

    reader = Reader(data, "a segment")
    count = reader.number(words.size)
    content = np.frombuffer(bytearray(reader.rest()), np.uint8)
    counts, sizes, parameters = np.zeros((3, small.MOST_CLASSES), np.int64)
    at, _, classes, nbytes = _small_plan.read_classes(
        content, count, words.size, 127, small.MOST_CLASSES, counts, sizes, parameters
    )
    end = np.cumsum(counts[:classes])
    begin, ranks = end - counts[:classes], np.empty(count, np.uint32)
    bits = content[at : at + nbytes]
    index = (
        _small_kernels.unpack_ranks(bits, np.flatnonzero(counts[:classes]), begin, end, sizes, parameters, ranks) / 8
    )
    values = content[at + nbytes :]
    by_exponent = np.bincount((change.before >> 7) & 255, minlength=256).astype(np.int64)
    groups = _small_plan.make_groups(by_exponent, small.GROUP, np.empty(256, np.uint8)) if values[0] == 1 else 1
    tables = np.zeros((groups, small.SYMBOLS), np.int64)
    described = 1 + (_rans.read_tables(values[1:], small.SCALE, tables) if values[0] else 0)
    header = len(data) - content.size + at + described
    return Bytes("small", count, index, len(data) - header - index, header)


def reference(old: Tensor, new: Tensor) -> Bytes:
    """What an ideal coder needs that knows the old exponents: the reference of the tests and the bench.

    Index: entropy of the change mask given the old exponent. Value: entropy of zigzagged differences of bit patterns.
    """
    change = _segment(old, new)[1]
    seen = np.unique(zigzag(change.before, change.after), return_counts=True)[1]
    value = float((seen * np.log2(change.positions.size / seen)).sum())
    return Bytes("reference", change.positions.size, (reference_bits(old, new) - value) / 8, value / 8)


def blind_index(old: Tensor, new: Tensor) -> float:
    """Bytes of the positions alone at the entropy of a mask that knows nothing but the density."""
    change = _segment(old, new)[1]
    p = change.positions.size / change.cells
    return float(-change.cells * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8) if p < 1 else 0.0


def _flat(change: Change, row: int) -> bytes:
    return change.positions.astype("<u4").tobytes()


def _rows(change: Change, row: int) -> bytes:
    rows, columns = np.divmod(change.positions, np.uint32(row))
    return rows.astype("<u4").tobytes() + columns.astype("<u4").tobytes()


def _mask(change: Change, row: int) -> bytes:
    mask = np.zeros(change.cells, bool)
    mask[change.positions] = True
    return np.packbits(mask, bitorder="little").tobytes()


def _gaps(change: Change, row: int) -> bytes:
    gaps, escapes = np.empty(change.positions.size, np.uint8), np.empty(5 * (change.cells // 255 + 1), np.uint8)
    used = kernels().gap_pack(change.positions, gaps, escapes)
    return bytes(gaps.tobytes() + escapes[:used].tobytes())


LAYOUTS: Mapping[str, tuple[Callable[[Change, int], bytes], Callable[[Change], bytes]]] = {
    "int32 index, value": (_flat, lambda c: c.after.tobytes()),
    "int32 row and column, value": (_rows, lambda c: c.after.tobytes()),
    "byte gap, value": (_gaps, lambda c: c.after.tobytes()),
    "byte gap, value in byte planes": (_gaps, lambda c: planes(c.after).tobytes()),
    "bit mask, value": (_mask, lambda c: c.after.tobytes()),
}
"""Layouts that are no codec here: how positions and values are laid out before one zstd-1 frame."""


def layout_bytes(old: Tensor, new: Tensor) -> dict[str, float]:
    """Bytes for each changed cell of :data:`LAYOUTS`, of all cells' XOR, and of the three codecs."""
    _, change, place = _segment(old, new)
    count = change.positions.size
    found = {
        name: len(pack(index(change, place.row) + value(change))) / count for name, (index, value) in LAYOUTS.items()
    }
    found["XOR of all cells"] = len(pack((as_words(old) ^ as_words(new)).tobytes())) / count
    return found | {codec: account(old, new, codec).per_change for codec in CODECS}


REGIMES: Mapping[str, tuple[str, float]] = {
    "FP32 masters, lr 1e-6": ("fp32", 1e-6),
    "FP32 masters, lr 3e-6": ("fp32", 3e-6),
    "stored in BF16, lr 3e-6": ("bf16", 3e-6),
}
NAMES: Mapping[str, str] = {
    "raw": "plain index<br>and value",
    "paper": "the paper's<br>format",
    "fast": "fast",
    "small": "small",
    "reference": "reference<br>entropy",
}


def accounts(old: Tensor, new: Tensor) -> list[Bytes]:
    """Plain coordinates (4 + 2 bytes a change), the three codecs, and the reference, in this order."""
    coded = [account(old, new, codec) for codec in CODECS]
    changed = coded[0].changed
    return [Bytes("raw", changed, 4.0 * changed, 2.0 * changed), *coded, reference(old, new)]


def bytes_figure(*, cells: int = CELLS) -> Any:
    """Bytes for each changed cell in positions, values and the rest, codec by codec; a control sets the stream.

    Args:
        cells: weights of each synthetic stream.
    """
    from dist_lib import viz

    colours = {"index": viz.PAPER["pulse"], "value": viz.SERIES[1], "header": viz.WORK["idle"]}
    labels = {"index": "positions", "value": "values", "header": "counts, classes, tables"}
    traces: list[Any] = []
    first: dict[str, float] = {}
    for regime, (storage, lr) in REGIMES.items():
        found = accounts(*settled_pair(storage, lr, cells=cells))
        first = first or {b.name: b.per_change for b in found}
        for part, name in labels.items():
            heights = [round(getattr(b, part) / b.changed, 3) for b in found]
            x = [NAMES[b.name] for b in found]
            traces.append(viz.bar(x, heights, name, color=colours[part], meta={"stream": regime}))
    regimes = list(REGIMES)
    return viz.figure(
        title="Where the bytes of a patch go",
        x="form",
        y="bytes for each changed weight",
        alt=(
            f"Stacked bars for {regimes[0]}: {first['raw']:.0f} bytes for a plain index and value, "
            f"{first['paper']:.1f} in the paper's format, {first['fast']:.1f} and {first['small']:.1f} in the codecs "
            f"fast and small, against {first['reference']:.1f} of the reference entropy"
        ),
        traces=traces,
        controls=[viz.Control(key="stream", label="Stream", values=regimes, initial=regimes[0])],
        rtol=0.1,
        barmode="stack",
    )
