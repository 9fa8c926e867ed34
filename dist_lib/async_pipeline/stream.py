"""Batches as the stages of a pipeline see them: checked before any of their rows is sent, one read ahead.

Every rank reads the same batches, so every rank finds the same fault at the same batch, and none is left waiting. The
number of batches of a list is agreed beforehand; a generator may end whenever it likes, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dist_lib.async_pipeline.numerics import split_batch

Batch = tuple[Tensor, Tensor]
Form = tuple[tuple[int, ...], torch.dtype, tuple[int, ...], torch.dtype]


class BatchError(ValueError):
    """A batch that cannot be cut into equal micro-batches of the agreed shape. ``losses``: of the batches before it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.losses: list[float] = []


class BatchStream:
    """An iterator over (inputs, targets) that knows whether another batch follows.

    Args:
        batches: equal on all ranks. Every batch has the rows of all replicas. A list or tuple is checked as a whole
            at once; of anything else each batch is checked when it is read, one batch before its rows are sent.
        micro_batches: m.
        replicas: r; replica k takes the k-th of r equal blocks of rows.

    Raises:
        BatchError: the first batch, or any batch of a list, does not fit.

    Attributes:
        problem: why the stream ended before its source did, if it did.
    """

    def __init__(self, batches: Iterable[Batch], *, micro_batches: int, replicas: int) -> None:
        self._parts, self._micro_batches, self._replicas = micro_batches * replicas, micro_batches, replicas
        self._form: Form | None = None
        self._read = 0
        self.problem: BatchError | None = None
        self._length = len(batches) if isinstance(batches, (list, tuple)) else None
        if isinstance(batches, (list, tuple)):
            for index, batch in enumerate(batches):
                self._check(index, batch)
        self._source = iter(batches)
        self._next = self._fetch()
        if self.problem is not None:
            raise self.problem

    @property
    def plan(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        return {"batches": self._length, "form": self._form}

    @property
    def form(self) -> Form | None:
        """Shapes and dtypes of the batches; None if there are none."""
        return self._form

    def _check(self, index: int, batch: Any) -> None:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)):
            raise BatchError(f"batch {index} is not a pair of tensors (inputs, targets)")
        inputs, targets = batch
        rows = inputs.shape[0] if inputs.ndim else 0
        if rows < 1 or rows % self._parts or targets.ndim == 0 or targets.shape[0] != rows:
            raise BatchError(
                f"batch {index} has inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; its rows must be "
                f"a multiple of {self._parts} ({self._micro_batches} micro-batches, {self._replicas} replicas), as "
                "many in both: leave out or pad an uneven last batch"
            )
        form = (tuple(inputs.shape), inputs.dtype, tuple(targets.shape), targets.dtype)
        if self._form is None:
            self._form = form
        elif form != self._form:
            raise BatchError(f"batch {index} has the form {form}; the batches before it have {self._form}: keep to one")

    def _fetch(self) -> Batch | None:
        batch = next(self._source, None)
        if batch is None:
            return None
        try:
            self._check(self._read, batch)
        except BatchError as error:
            self.problem = error
            return None
        self._read += 1
        return batch

    @property
    def waiting(self) -> bool:
        """Whether another batch is there."""
        return self._next is not None

    def take(self) -> Batch:
        """The next batch; the one after it is read at once.

        Raises:
            StopIteration: there is none.
        """
        batch = self._next
        if batch is None:
            raise StopIteration("the stream has no further batch: ask waiting first")
        self._next = self._fetch()
        return batch

    def first_micro_batch(self, replica: int) -> Batch:
        """The first micro-batch of the next batch, which stays in the stream.

        Raises:
            StopIteration: there is no batch.
        """
        if self._next is None:
            raise StopIteration("the stream has no further batch: ask waiting first")
        inputs, targets = self._next
        return self.micro_batches(inputs, replica)[0], self.micro_batches(targets, replica)[0]

    def micro_batches(self, tensor: Tensor, replica: int) -> list[Tensor]:
        """The rows of one replica, cut into m equal parts, ascending."""
        return split_batch(tensor.chunk(self._replicas)[replica], self._micro_batches)
