"""Where a speed-up comes from when memory is short: from layers that need not be computed again.

A baseline that computes ``R`` of a stage's ``L`` layers again in its backward pass spends ``1 + f R / L`` of the time
of one that does not, where ``f`` is the forward pass's share; encoding and decoding cost a factor of their own. Both
come from the paper's tables 5 and 6 (arXiv 2605.00539), so that its table 2 follows without a number fitted to it. It
is our derivation, and a model: nothing is timed here. Gradients in 8 bits do not enter: table 2 has two data-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_lib.agoq.published import TABLE_2, TABLE_5, TABLE_6, SpeedRow

STAGE_LAYERS = 10  # of table 2: 40 layers on 4 stages


@dataclass(frozen=True)
class LayerSpeed:
    """What the model needs to know of a layer.

    Attributes:
        forward_share: of the time of a forward and a backward pass, without quantisation.
        overhead: factor by which quantising lengthens both.
    """

    forward_share: float
    overhead: float

    def speedup(self, recomputed: int, layers: int) -> float:
        """Time of a baseline with ``recomputed`` of ``layers`` layers computed again, over that of quantising.

        Raises:
            ValueError: no layers, or more recomputed than there are.
        """
        if layers < 1 or not 0 <= recomputed <= layers:
            raise ValueError(f"{recomputed} of {layers} layers recomputed: give 0 to {max(layers, 1)}, of at least 1")
        return (1 + self.forward_share * recomputed / layers) / self.overhead

    def worth_it(self, layers: int) -> int:
        """The fewest recomputed layers that make up for the overhead; more than ``layers``: none do."""
        return next((r for r in range(layers + 1) if self.speedup(r, layers) > 1), layers + 1)


def published_speed() -> LayerSpeed:
    """Share and overhead from tables 5 and 6: 0.369 and 1.0237."""
    forward, backward = TABLE_5.baseline_total_ms, TABLE_6.baseline_total_ms
    quantised = TABLE_5.agoq_total_ms + TABLE_6.agoq_total_ms
    return LayerSpeed(forward / (forward + backward), quantised / (forward + backward))


@dataclass(frozen=True)
class SpeedResult:
    """A row of table 2 with the modelled speed-up.

    Attributes:
        row: as published.
        measured: its times divided.
        modelled: from its recomputed layers.
    """

    row: SpeedRow
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Modelled over measured, less one."""
        return self.modelled / self.measured - 1


def speed_table(speed: LayerSpeed | None = None, *, against: str = "megatron") -> tuple[SpeedResult, ...]:
    """Table 2 again, from the numbers of recomputed layers alone.

    Args:
        speed: default: :func:`published_speed`.
        against: ``"megatron"`` or ``"zero1"``.

    Raises:
        ValueError: another baseline.
    """
    if against not in ("megatron", "zero1"):
        raise ValueError(f"against {against!r}: allowed are megatron, zero1")
    layer, found = speed or published_speed(), []
    for row in TABLE_2:
        base = row.megatron_ms if against == "megatron" else row.zero1_ms
        recomputed = row.megatron_recomputed if against == "megatron" else row.zero1_recomputed
        found.append(SpeedResult(row, base / row.agoq_ms, layer.speedup(recomputed, STAGE_LAYERS)))
    return tuple(found)
