"""Encode whatever autograd saves, in any model: the general way, by hooks on saved tensors.

It needs no knowledge of the model and changes no module, but it can only encode the tensors that the plain layers keep:
nothing is rebuilt, so more is stored, and with more error, than by the layers of :mod:`dist_lib.agoq.modules`. It is
there for models that those do not know, and to measure what encoding each tensor costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dist_lib.agoq.functions import Format

REMEMBERED = 4


@dataclass(frozen=True)
class _Stored:
    parts: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    form: Format


class QuantizedSavedTensors:
    """Context manager around a forward pass: what it saves for backward is encoded by module.

    Args:
        model: modules are told apart by their names in it; its parameters and buffers are never encoded.
        policy: patterns of module names (as in ``fnmatch``), in order, and how tensors saved while that module runs are
            stored; the first that matches counts, and None leaves them. The name is that of the innermost module, ""
            outside of all: ``{"*.self_attn": None, "*": Format("fp4")}`` spares attention's own tensors.
        min_elements: smaller tensors are left alone.

    A tensor that several operations save one after another is encoded once. Backward may run inside or after the
    context; under activation checkpointing the recomputation must run inside.

    Attributes:
        stored: (module name, shape, bytes) of each tensor encoded, in order.
    """

    def __init__(self, model: nn.Module, policy: Mapping[str, Format | None], *, min_elements: int = 1024) -> None:
        self._policy = dict(policy)
        self._min = min_elements
        self._model = model
        self._path: list[str] = []
        self._recent: deque[tuple[Tensor, int, _Stored]] = deque(maxlen=REMEMBERED)  # alive, so no address is reused
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._known: set[int] = set()
        self.stored: list[tuple[str, tuple[int, ...], int]] = []

    @property
    def bytes(self) -> int:
        """Bytes of all codes and scales stored so far."""
        return sum(count for _, _, count in self.stored)

    def _form(self, name: str) -> Format | None:
        return next((form for pattern, form in self._policy.items() if fnmatchcase(name, pattern)), None)

    def _pack(self, tensor: Tensor) -> Tensor | _Stored:
        name = self._path[-1] if self._path else ""
        form = self._form(name)
        if form is None or form.codec is None or not tensor.is_floating_point() or tensor.numel() < self._min:
            return tensor
        if tensor.untyped_storage().data_ptr() in self._known:
            return tensor
        for seen, version, stored in self._recent:
            alike = seen.data_ptr() == tensor.data_ptr() and seen.stride() == tensor.stride()
            unchanged = version == seen._version == tensor._version and seen.dtype == tensor.dtype
            if alike and unchanged and stored.shape == tensor.shape and stored.form == form:
                return stored
        kept = _Stored(form.encode(tensor), tensor.shape, tensor.dtype, form)
        self._recent.append((tensor.detach(), tensor._version, kept))
        self.stored.append((name, tuple(tensor.shape), sum(part.nbytes for part in kept.parts)))
        return kept

    @staticmethod
    def _unpack(kept: Tensor | _Stored) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.form.decode(kept.parts, kept.shape, kept.dtype)

    def __enter__(self) -> QuantizedSavedTensors:
        owned = [*self._model.parameters(), *self._model.buffers()]
        self._known = {t.untyped_storage().data_ptr() for t in owned}
        for name, module in self._model.named_modules():

            def push(*_: Any, name: str = name) -> None:
                self._path.append(name)

            def pop(*_: Any) -> None:
                self._path.pop()

            self._handles.append(module.register_forward_pre_hook(push))
            self._handles.append(module.register_forward_hook(pop, always_call=True))
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, value, trace)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recent.clear()
        self._path.clear()
