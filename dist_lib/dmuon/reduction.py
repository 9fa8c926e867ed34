"""The gradients' way to their owners: in one fixed order on every rank, whatever is ready first.

A pass over the layers begins with the first backward and ends in :meth:`GradientPass.finish`. Within it every rank
starts the reductions of all layers, once, in the same order: a layer goes when its gradients are complete *and* all
layers before it have gone; what is left goes at the end, with zeros where this rank has no gradient. Then the ranks
exchange which parameters had a gradient anywhere, and which layers got more of it after they had gone; those go again.
So neither timing nor a parameter that only some ranks use can change which collectives are called, or their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dist_lib.comm import collectives
from dist_lib.dmuon.events import EventLog
from dist_lib.dmuon.packing import LayerGroup, Pack, lay, take

# Reduces a flat buffer to the owner: the mean there, None on every other rank.
Transport = Callable[[Pack, Tensor], Tensor | None]


class GradientPass:
    """Brings gradients to owners; keeps the averaged ones.

    Args:
        groups: layers in the order in which they are reduced, the same on all ranks.
        parameters: by name.
        transport: how one buffer is reduced.
        log: for events.
        group: ranks that take part.
        overlap: start during backward.
        extra: parameters that others reduce but whose use this pass finds out.

    Attributes:
        gradients: on the owner, averaged, by name; accumulates until :meth:`clear`.
        finished: whether the pass is over and ``gradients`` is complete.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        parameters: Mapping[str, Parameter],
        transport: Transport,
        log: EventLog,
        *,
        group: dist.ProcessGroup | None,
        overlap: bool,
        extra: Mapping[str, Parameter],
    ) -> None:
        self.groups, self.parameters, self.extra = tuple(groups), dict(parameters), dict(extra)
        self._transport, self._log, self._group, self._overlap = transport, log, group, overlap
        self.gradients: dict[str, Tensor] = {}
        self.finished = False
        self.on_gradient: Callable[[str], None] | None = None
        self._position = 0
        self._ready: set[str] = set()
        self._used: set[str] = set()
        self._paused, self._end_queued = 0, False
        device = next(iter({**self.parameters, **self.extra}.values())).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(name))
            for name, p in self.parameters.items()
            if p.requires_grad
        ]
        self._hooks += [p.register_post_accumulate_grad_hook(self._other_hook) for p in self.extra.values()]

    def remove_hooks(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()

    @property
    def begun(self) -> bool:
        """Whether some reductions of the present pass have been started on this rank and others not."""
        return 0 < self._position < len(self.groups)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block, gradients add up on each rank and nothing is sent."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._ready.clear()  # what counts is the backward after the block

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def accumulated(_: Tensor) -> None:
            if self.finished:
                raise RuntimeError(
                    "backward after the gradients were reduced for clipping and before step(): call step() or "
                    "zero_grad() first"
                )
            self._ready.add(name)
            if self.on_gradient is not None:
                self.on_gradient(name)
            if not self._paused and self._overlap:
                self._queue_end()
                self._advance()

        return accumulated

    def _queue_end(self) -> None:
        if not self._end_queued:
            self._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._end_queued = False
        self._reduce_rest()

    def _reduce_rest(self) -> None:
        while self._position < len(self.groups):
            self._position += 1
            self._reduce(self.groups[self._position - 1])

    def _other_hook(self, _: Tensor) -> None:
        if not self._paused and self._overlap and not self.finished:
            self._queue_end()

    def _advance(self) -> None:
        while self._position < len(self.groups):
            group = self.groups[self._position]
            if not all(name in self._ready for name in group.names):
                return
            self._position += 1
            self._reduce(group)

    @torch.no_grad()
    def _reduce(self, group: LayerGroup) -> None:
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._stream is not None:  # the reducer's work then runs beside backward
            self._stream.wait_stream(torch.cuda.current_stream())
            context = torch.cuda.stream(self._stream)
        with context:
            for pack in group.packs:
                self._reduce_pack(group, pack)

    def _reduce_pack(self, group: LayerGroup, pack: Pack) -> None:
        parameters = [self.parameters[name] for name in pack.names]
        start = self._log.mark()
        parts = []
        for name, p in zip(pack.names, parameters, strict=True):
            if p.grad is not None:
                self._used.add(name)
                if self._stream is not None:
                    p.grad.record_stream(self._stream)
            parts.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
        mean = self._transport(pack, lay(parts, pack.reduce_dtype))
        if mean is not None:
            for name, view in zip(pack.names, take(mean, [p.shape for p in parameters]), strict=True):
                known = self.gradients.get(name)
                self.gradients[name] = view if known is None else known.add_(view)
        self._log.add("reduce", group.layer, pack.reduce_bytes, start)

    @torch.no_grad()
    def finish(self) -> set[str]:
        """End the pass; return the names that had a gradient on any rank since :meth:`clear`. Collective.

        A second call before :meth:`clear` or :meth:`restart` does nothing.
        """
        if self.finished:
            return self._used
        self._reduce_rest()
        used, late = self._exchange()
        for group in late:
            self._reduce(group)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._used = used
        self.gradients = {n: g for n, g in self.gradients.items() if n in used}
        self.finished = True
        return used

    def _exchange(self) -> tuple[set[str], list[LayerGroup]]:
        names = [*self.parameters, *self.extra]
        everything = {**self.parameters, **self.extra}
        flags = [n in self._used or everything[n].grad is not None for n in names]
        flags += [any(self.parameters[n].grad is not None for n in g.names) for g in self.groups]
        row = torch.tensor(flags, dtype=torch.int32, device=next(iter(everything.values())).device)
        collectives.all_reduce(row, op="max", group=self._group)
        found = [bool(v) for v in row.tolist()]
        used = {n for n, flag in zip(names, found, strict=False) if flag}
        return used, [g for g, flag in zip(self.groups, found[len(names) :], strict=True) if flag]

    @property
    def control_bytes(self) -> int:
        """Payload of the exchange in :meth:`finish`: four bytes a parameter and a layer."""
        return 4 * (len(self.parameters) + len(self.extra) + len(self.groups))

    def restart(self) -> None:
        """Begin the next pass, keeping the gradients as accumulated so far."""
        self._position, self.finished, self._end_queued = 0, False, False
        self._ready.clear()

    def clear(self) -> None:
        """Forget gradients, on their way or arrived.

        Raises:
            RuntimeError: a backward ended with an error while reductions were under way; other ranks stand elsewhere.
        """
        if self.begun:
            raise RuntimeError(
                "a backward ended early, when some gradients were on their way to their owners already and others not; "
                "restart from a checkpoint, or call finish_backward() on every rank and then zero_grad()"
            )
        for p in self.parameters.values():
            p.grad = None
        self.gradients.clear()
        self._used.clear()
        self.restart()
