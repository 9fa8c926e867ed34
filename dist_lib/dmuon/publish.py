"""Weights on their way from one rank to the others of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dist_lib.dmuon.events import Mark
from dist_lib.dmuon.packing import Pack, lay, take


class Publication:
    """A pack being broadcast. The buffer is the transfer's own: what it was made from may change at once.

    Args:
        pack: what travels.
        sources: tensors by name on the rank that sends, None on the others.
        src: global rank that sends.
        group: ranks that take part.
        device: of the buffer.
        start: when it began, for events.
    """

    def __init__(
        self,
        pack: Pack,
        sources: Mapping[str, Tensor] | None,
        *,
        src: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        start: Mark | None,
    ) -> None:
        self.pack, self.start = pack, start
        if sources is None:
            self._buffer = torch.empty(pack.numel, dtype=pack.dtype, device=device)
        else:
            self._buffer = lay([sources[n] for n in pack.names], pack.dtype)
        self._work = dist.broadcast(self._buffer, src, group=group, async_op=True)

    def wait(self, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Block until it has arrived; return views of the buffer, of the given shapes."""
        if self._work is not None:
            self._work.wait()
        return take(self._buffer, shapes)
