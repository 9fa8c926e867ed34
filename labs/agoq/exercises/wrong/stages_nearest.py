from collections.abc import Sequence
from fractions import Fraction


def in_flight(stages: int, micro_batches: int) -> list[int]:
    return [min(stages - stage, micro_batches) for stage in range(stages)]


def bits(counts: Sequence[int], fixed: Fraction, coded: Fraction, widths: Sequence[int]) -> list[int]:
    raw = [Fraction(widths[0] * counts[0], n) for n in counts]
    return [min(widths, key=lambda w: abs(w - b)) for b in raw]
