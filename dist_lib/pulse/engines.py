"""Into a live model: its own tensors take the bits of the newest verified version, and nothing else of it changes.

:class:`ModelReceiver` follows a store for any ``torch.nn.Module``, such as a Hugging Face model that generates. Patches
are applied and verified beside the model, in a copy on the CPU; then only the changed cells are written, into the
storage that the model has, and read back. Whatever fails, the model serves what it served. Engines that keep weights in
a layout of their own are served by :mod:`dist_lib.pulse.engines_vllm`; quantised ones see :mod:`dist_lib.pulse.fp8`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dist_lib.pulse.errors import StateError
from dist_lib.pulse.state import State, as_words, find_ties
from dist_lib.pulse.subscriber import Subscriber

logger = logging.getLogger(__name__)


def llama_name(name: str) -> str:
    """Name in a Hugging Face Llama of a tensor of the book's decoder: ``model.`` before all but the head."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


@dataclass(frozen=True)
class Served:
    """What one :meth:`ModelReceiver.poll` wrote.

    Attributes:
        previous: version before; None for the weights that the model came with.
        version: version now.
        tensors: written, tied ones once.
        cells: written; whole tensors count in full.
        seconds: from the look at the store to the last check.
    """

    previous: int | None
    version: int
    tensors: int
    cells: int
    seconds: float


@dataclass(frozen=True)
class _Write:
    name: str
    target: Tensor
    new: Tensor
    old: Tensor
    where: Tensor | None  # flat indices of changed cells; None for all of them


class ModelReceiver:
    """Keeps a live model at the newest version of a store, in place.

    Args:
        model: its ``state_dict()`` must have the published names (after ``rename``) and shapes, and their dtypes or
            wider floating-point ones, which hold the same numbers.
        subscriber: of the store; holds one copy of the published state on the CPU.
        rename: published name to name in the model; None for the same, :func:`llama_name` for our decoder in a Hugging
            Face Llama.

    ``version`` is what the model serves; None for the weights that it came with.
    """

    def __init__(self, model: nn.Module, subscriber: Subscriber, *, rename: Callable[[str], str] | None = None) -> None:
        self.model, self.subscriber = model, subscriber
        self.rename: Callable[[str], str] = rename or (lambda name: name)
        self.version: int | None = None
        self._served: Mapping[str, Tensor] = {}

    def poll(self, *, most: int | None = None) -> Served | None:
        """Bring the model to the newest version that can be reached; None if it serves that already.

        Call it between two forward passes: a pass that runs meanwhile may see both versions.

        Args:
            most: do not go beyond this version; None for no limit.

        Raises:
            StateError: names, shapes, dtypes or ties of the model and of what is published do not fit, or what was
                written does not read back. The model is as before.
            CorruptPatchError, MissingObjectError, OSError: see :meth:`dist_lib.pulse.Subscriber.poll`. The model is as
                before.
        """
        start = time.monotonic()
        self.subscriber.poll(most=most)
        state, version = self.subscriber.state, self.subscriber.version
        if state is None or version is None or version == self.version:
            return None
        writes = self._plan(state)
        try:
            with torch.no_grad():
                for write in writes:
                    _put(write, write.new)
            torn = [w.name for w in writes if not _holds(w)]
        except Exception:
            _restore(writes)
            raise
        if torn:
            _restore(writes)
            raise StateError(f"{torn[:5]} do not read back as written; does something else write to the model?")
        previous, self.version, self._served = self.version, version, state
        cells = sum(w.new.numel() if w.where is None else w.where.numel() for w in writes)
        return Served(previous, version, len(writes), cells, time.monotonic() - start)

    def _plan(self, state: State) -> list[_Write]:
        """What must be written, after all checks that need no writing."""
        targets = self.model.state_dict()
        named = {self.rename(name): name for name in state}
        if set(named) != set(targets) or len(named) != len(state):
            wrong = sorted(set(named) ^ set(targets))
            raise StateError(f"the model and what is published differ in names: {wrong[:5]}; see rename")
        ties = find_ties(targets)
        writes = []
        for name, target in targets.items():
            new = state[named[name]]
            _check(name, target, new)
            if name in ties:
                owner = state[named[ties[name]]]
                if new is not owner and not np.array_equal(as_words(new), as_words(owner)):
                    raise StateError(
                        f"{name!r} and {ties[name]!r} share storage in the model, but were published apart"
                    )
                continue
            known = self._served.get(named[name])
            if known is not new:
                writes.append(_write(name, target, new, known))
        return writes


def _check(name: str, target: Tensor, new: Tensor) -> None:
    wider = target.is_floating_point() and new.is_floating_point() and target.dtype.itemsize > new.dtype.itemsize
    if target.shape != new.shape or not (target.dtype == new.dtype or wider):
        raise StateError(
            f"{name!r} is {target.dtype} {tuple(target.shape)} in the model and was published as {new.dtype} "
            f"{tuple(new.shape)}; shapes must agree, and the model's dtype be the same or a wider one"
        )


def _write(name: str, target: Tensor, new: Tensor, known: Tensor | None) -> _Write:
    """Changed cells where what the model holds is known to be ``known``, else the whole tensor."""
    if known is None or not target.is_contiguous():
        return _Write(name, target, new, target.clone() if known is None else known, None)
    where = torch.from_numpy(np.flatnonzero(as_words(new) != as_words(known)))
    return _Write(name, target, new, known, where)


def _put(write: _Write, values: Tensor) -> None:
    if write.where is None:
        write.target.copy_(values)
        return
    flat = write.target.view(-1)
    picked = values.reshape(-1)[write.where.to(values.device)]
    flat[write.where.to(flat.device)] = picked.to(flat.device, flat.dtype)


def _holds(write: _Write) -> bool:
    """Whether the target has the bits of the new tensor everywhere; what others wrote to it is replaced first."""
    wanted = as_words(write.new.to(write.target.dtype))
    if np.array_equal(as_words(write.target), wanted):
        return True
    logger.warning("%s was changed by something else meanwhile; it is written whole", write.name)
    with torch.no_grad():
        write.target.copy_(write.new)
    return np.array_equal(as_words(write.target), wanted)


def _restore(writes: list[_Write]) -> None:
    with torch.no_grad():
        for write in writes:
            try:
                write.target.copy_(write.old)
            except RuntimeError as error:  # it could not be written to before either
                logger.warning("%s stays as it is: %s", write.name, error)
