"""Reference solution."""

from collections.abc import Sequence
from math import ceil


def step_payload(
    shapes: Sequence[tuple[int, int]], ranks: int, mode: str, *, weight: int, gradient: int, micro_batches: int
) -> int:
    whole = sum(rows * cols for rows, cols in shapes)
    if mode == "replicated":
        return whole * gradient
    if mode == "gather-free":
        part = sum(ceil(rows / ranks) * cols for rows, cols in shapes)
        return 2 * micro_batches * part * weight + ranks * part * gradient + part * gradient
    spreads = {"ddp": 1, "fsdp-keep": micro_batches, "fsdp-free": 2 * micro_batches}[mode]
    return whole * gradient + spreads * whole * weight
