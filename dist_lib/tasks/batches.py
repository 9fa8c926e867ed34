"""Batches that depend on the seed and the step alone, never on the number of ranks.

Step ``t`` draws the same global batch everywhere; a rank takes its rows of it. So one process and many see the same
data in the same order, and a run can be resumed at any step without replaying the steps before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BatchSampler:
    """Random windows of a token stream.

    Args:
        tokens: 1-D integer tensor.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        seed: which windows.

    Raises:
        ValueError: sizes below 1, or a stream shorter than one window.
    """

    def __init__(self, tokens: Tensor, *, batch_size: int, seq_len: int, seed: int = 0) -> None:
        if batch_size < 1 or seq_len < 1 or tokens.ndim != 1 or len(tokens) <= seq_len:
            raise ValueError(
                f"batch_size {batch_size}, seq_len {seq_len}, tokens of shape {tuple(tokens.shape)}: need sizes of at "
                f"least 1 and a 1-D stream longer than seq_len"
            )
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and next-token targets of one step, both (batch_size, seq_len) int64."""
        return self._rows(step, 0, self.batch_size)

    def _rows(self, step: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Rows of the global batch in storage of their own: a view would keep the whole batch alive for backward."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.tokens) - self.seq_len, (self.batch_size, 1), generator=generator)
        rows = self.tokens[starts[begin:end] + torch.arange(self.seq_len + 1)].long()
        keep = torch.contiguous_format
        return rows[:, :-1].clone(memory_format=keep), rows[:, 1:].clone(memory_format=keep)

    def shard(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of :meth:`batch`: contiguous blocks in rank order, sizes differing by at most one.

        Raises:
            ValueError: a rank outside the world, or more ranks than rows.
        """
        if not 0 <= rank < world_size or world_size > self.batch_size:
            raise ValueError(
                f"rank {rank} of {world_size} with {self.batch_size} rows: every rank needs a row; use fewer "
                f"ranks or a larger batch"
            )
        begin = rank * self.batch_size // world_size
        end = (rank + 1) * self.batch_size // world_size
        return self._rows(step, begin, end)
