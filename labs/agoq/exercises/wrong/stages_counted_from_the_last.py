from collections.abc import Sequence
from fractions import Fraction


def in_flight(stages: int, micro_batches: int) -> list[int]:
    return [min(stage + 1, micro_batches) for stage in range(stages)]


def bits(counts: Sequence[int], fixed: Fraction, coded: Fraction, widths: Sequence[int]) -> list[int]:
    budget = counts[0] * (fixed + coded * Fraction(widths[0], 16))
    return [max(w for w in widths if n * (fixed + coded * Fraction(w, 16)) <= budget) for n in counts]
