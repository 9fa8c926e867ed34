from collections.abc import Sequence
from fractions import Fraction


def in_flight(stages: int, micro_batches: int) -> list[int]:
    most = []
    for stage in range(stages):
        warm_up, held, peak = stages - 1 - stage, 0, 0
        for step in range(micro_batches):
            if step > warm_up:
                held -= 1
            held += 1
            peak = max(peak, held)
        most.append(peak)
    return most


def bits(counts: Sequence[int], fixed: Fraction, coded: Fraction, widths: Sequence[int]) -> list[int]:
    found = []
    for n in counts:
        room = Fraction(counts[0], n) * (fixed + coded * widths[0] / 16) - fixed
        chosen = widths[0]
        for width in widths[1:]:
            if coded * width <= 16 * room:
                chosen = width
        found.append(chosen)
    return found
