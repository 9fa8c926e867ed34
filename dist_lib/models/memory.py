"""Bytes held for backward, counted where autograd saves them.

Storages are counted once, however many saved tensors look at them, and parameters not at all. The count is of what
autograd keeps, not of an allocator's peak.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn


class SavedTensorCounter:
    """Context manager around a forward pass; ``bytes`` is what is held for its backward pass at the end.

    Args:
        model: its parameters and buffers are left out.

    Attributes:
        tensors: ``(shape, dtype, storage bytes)`` of each storage, in the order in which it was first saved.
    """

    def __init__(self, model: nn.Module) -> None:
        owned = [*model.parameters(), *model.buffers()]
        self._known = {t.untyped_storage().data_ptr() for t in owned}
        self._kept: list[Tensor] = []  # keeps storages alive, so that no address is used twice
        self.tensors: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._kept.append(tensor.detach())
            self.tensors.append((tuple(tensor.shape), tensor.dtype, storage.nbytes()))
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of all storages seen."""
        return sum(n for _, _, n in self.tensors)

    def __enter__(self) -> SavedTensorCounter:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, value, trace)
        self._kept.clear()
