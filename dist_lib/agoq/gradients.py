"""Main gradients in 8 bits: what the micro-batches of a step add up to, held as codes and summed over ranks as codes.

>>> gradients = QuantizedGradients(model.named_parameters())
>>> gradients.attach()                        # from now on backward adds here, and leaves p.grad None
>>> for batch in micro_batches: loss(batch).backward()
>>> gradients.all_reduce()
>>> gradients.clip_(1.0)
>>> for name, parameter, gradient in gradients.items(): ...      # one float32 gradient at a time
>>> gradients.reset()

A parameter then costs 1 + 4/block bytes instead of 4. Each micro-batch is added in float32 and rounded afresh, so the
error of M of them grows as about the square root of M (our derivation). The codes that are stored are those that are
sent. Parameters below the reducer's threshold are kept, and reduced, in float32.

Source: AGoQ (arXiv 2605.00539), gradient quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from dist_lib.agoq.buckets import Bucket
from dist_lib.agoq.collectives import sum_and_encode
from dist_lib.agoq.reducer import QuantizedReducer
from dist_lib.agoq.wire import Hops
from dist_lib.comm import ExactReducer, collectives
from dist_lib.ops import accumulate_


def _squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += tensor.double().square().sum()
    return total


def _shared_norm(squares: Tensor, group: dist.ProcessGroup | None, size: int) -> float:
    """Root of the sum over ranks, added in rank order, so that every rank clips by the same bits."""
    return float((collectives.ordered_sum(squares, group=group) if size > 1 else squares).sqrt())


@dataclass(frozen=True)
class GradientShards:
    """This rank's part of the reduced gradients, in float32, for an optimizer whose state is sharded likewise.

    Attributes:
        parts: by parameter, the numbers of its flattened gradient that this rank holds, as a slice, and their values;
            parameters of which it holds none are left out.
        whole: by parameter, small gradients, which every rank holds whole.
        group: the ranks.
        rank, size: this rank's index and their number.
    """

    parts: Mapping[str, tuple[slice, Tensor]]
    whole: Mapping[str, Tensor]
    group: dist.ProcessGroup | None
    rank: int
    size: int

    def norm(self) -> float:
        """Euclidean norm of the whole gradient, from the shards: the same bits on every rank. Collective."""
        mine = [values for _, values in self.parts.values()] + (list(self.whole.values()) if self.rank == 0 else [])
        device = next((t.device for t in [*mine, *self.whole.values()]), _device(self.group))
        return _shared_norm(_squares(mine, device), self.group, self.size)

    def clip_(self, max_norm: float) -> float:
        """Scale the gradients to ``max_norm`` if their norm is larger; return the norm. Collective."""
        norm = self.norm()
        factor = clip_factor(norm, max_norm)
        for tensor in [*(values for _, values in self.parts.values()), *self.whole.values()]:
            tensor.mul_(factor)
        return norm


def _device(group: dist.ProcessGroup | None) -> torch.device:
    nccl = dist.is_initialized() and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients of norm ``norm`` by; NaN if the norm is not finite, so that nobody steps unawares.

    Raises:
        ValueError: a ``max_norm`` that is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; need a number above 0")
    if not math.isfinite(norm):
        return math.nan
    return max_norm / norm if norm > max_norm else 1.0


class QuantizedGradients:
    """Main gradients in 8 bits, by parameter.

    Args:
        parameters: names and parameters, plain tensors on one device, in the same order on all ranks; those without
            ``requires_grad`` are left out.
        reducer: its format, threshold, nodes and random numbers are used; default: ``QuantizedReducer()``.
        group: ranks to sum over (default: all; one process alone needs none).
        bucket_elements: numbers that are sent at a time; about three bytes each are needed while they are.

    Attributes:
        parameters: by name.
        state: ``"local"``; ``"reduced"``, when summed over ranks; ``"scattered"``, when the sum is in the shards that
            :meth:`reduce_scatter` gave. Only local gradients can be added to; :meth:`reset` begins anew.

    Raises:
        TypeError: a parameter that is a DTensor, which its runtime reduces itself.
        ValueError: no parameters, several devices, a reducer with error feedback, or a bucket of no elements.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Parameter]],
        reducer: QuantizedReducer | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_elements: int = 2**25,
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.reducer = reducer or QuantizedReducer()
        self._check(bucket_elements)
        self._group, self.state = group, "local"
        self._hops: Hops | None = self.reducer.hops(group) if dist.is_initialized() else None
        self.device = next(iter(self.parameters.values())).device
        large = {n: p for n, p in self.parameters.items() if not self.reducer.is_exact(p.numel()) and p.numel()}
        small = [n for n in self.parameters if n not in large]
        self._buckets = [
            Bucket({n: large[n].shape for n in names}, self.reducer.form, self.size, self.device)
            for names in _fill(large, bucket_elements)
        ]
        self._home = {name: bucket for bucket in self._buckets for name in bucket.names}
        counts = [self.parameters[n].numel() for n in small]
        self._flat = torch.zeros(sum(counts), dtype=torch.float32, device=self.device)
        views = self._flat.split(counts) if counts else ()
        self._exact: dict[str, Tensor] = {
            n: v.view(self.parameters[n].shape) for n, v in zip(small, views, strict=True)
        }
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def _check(self, bucket_elements: int) -> None:
        sharded = [n for n, p in self.parameters.items() if isinstance(p, DTensor)]
        if sharded:
            raise TypeError(f"{sharded[0]} is a DTensor: under FSDP2 use quantize_fsdp_gradients")
        devices = {p.device for p in self.parameters.values()}
        if len(devices) != 1:
            raise ValueError(f"parameters that need a gradient are on devices {sorted(map(str, devices))}; need one")
        if self.reducer.feedback:
            raise ValueError("the codes that are stored are sent as they are: use a reducer without error feedback")
        if bucket_elements < 1:
            raise ValueError(f"bucket_elements is {bucket_elements}; need 1 or more")

    # ---- accumulation ---------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self._hops is None else self._hops.size

    @property
    def nbytes(self) -> int:
        """Bytes held by codes, scales, and the float32 gradients of small parameters."""
        return sum(b.nbytes for b in self._buckets) + self._flat.nbytes

    @torch.no_grad()
    def add_(self, name: str, gradient: Tensor) -> None:
        """Add a gradient: decoded, added in float32, encoded, in one pass.

        Raises:
            KeyError: an unknown name.
            RuntimeError: the gradients are reduced already.
            ValueError, TypeError: another shape, or a dtype that cannot be encoded.
        """
        if self.state != "local":
            raise RuntimeError(f"a gradient of {name} after the reduction over ranks: call reset() first")
        if name in self._home:
            view, form = self._home[name].view(name), self.reducer.form
            accumulate_(view, gradient, form.rounding, self.reducer.generator)
        elif gradient.shape != self._exact[name].shape:
            raise ValueError(f"{name} has shape {tuple(self._exact[name].shape)}, its gradient {tuple(gradient.shape)}")
        else:
            self._exact[name] += gradient

    def attach(self) -> None:
        """Let backward add here: each gradient is taken when it is complete, and ``p.grad`` is None again."""

        def taker(name: str) -> None:
            def take(parameter: Tensor) -> None:
                if parameter.grad is not None:
                    self.add_(name, parameter.grad)
                    parameter.grad = None

            self._handles.append(self.parameters[name].register_post_accumulate_grad_hook(take))

        if not self._handles:
            for name in self.parameters:
                taker(name)

    def detach(self) -> None:
        """Leave gradients to ``p.grad`` again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Back to zero, a NaN included."""
        for bucket in self._buckets:
            bucket.zero_()
        self._flat.zero_()
        self.state = "local"

    # ---- reading --------------------------------------------------------------------------------------------------

    def gradient(self, name: str) -> Tensor:
        """One gradient, decoded: a new float32 tensor of the parameter's shape.

        Raises:
            RuntimeError: the sum is in the shards.
        """
        self._readable()
        if name in self._home:
            return self._home[name].view(name).dequantize()
        return self._exact[name].clone()

    def items(self) -> Iterator[tuple[str, Parameter, Tensor]]:
        """(name, parameter, float32 gradient), one after another, so that never all are decoded at once."""
        for name, parameter in self.parameters.items():
            yield name, parameter, self.gradient(name)

    def assign(self) -> None:
        """Set every ``p.grad``, in the parameter's dtype; for optimizers that step all parameters at once."""
        for _, parameter, gradient in self.items():
            parameter.grad = gradient.to(parameter.dtype)

    def is_finite(self) -> bool:
        """Whether no gradient holds a NaN or infinity: seen from the scales, nothing is decoded."""
        return all(bool(b.shards.scales.isfinite().all()) for b in self._buckets) and bool(self._flat.isfinite().all())

    def norm(self) -> float:
        """Euclidean norm over all parameters; once reduced, collective: each rank decodes its own shard only."""
        self._readable()
        if self.state == "local" or self._hops is None:
            return float(_squares((g for _, _, g in self.items()), self.device).sqrt())
        rank = self._hops.rank
        own = [b.shards.row(rank).decode() for b in self._buckets]
        own += [self._flat] if rank == 0 else []
        return _shared_norm(_squares(own, self.device), self._group, self.size)

    @torch.no_grad()
    def clip_(self, max_norm: float) -> float:
        """Scale to ``max_norm`` if the norm is larger; return the norm. Scales are multiplied, codes stay.

        Collective once reduced. A norm that is not finite makes all gradients NaN.

        Raises:
            ValueError: a ``max_norm`` that is not above 0.
        """
        norm = self.norm()
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            for bucket in self._buckets:
                bucket.shards.scales.mul_(factor)
            self._flat.mul_(factor)
        return norm

    # ---- over ranks -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def all_reduce(self, *, average: bool = True) -> None:
        """Sum or average over ranks; all then hold the same codes. Collective.

        Raises:
            RuntimeError: they are reduced already.
        """
        self._begin("reduced")
        if self._hops is None or self._hops.size == 1:
            return
        for bucket in self._buckets:
            divisor = self.size if average else 1
            own = sum_and_encode(bucket.shards, self._hops, divisor, generator=self.reducer.generator)
            bucket.take(self._hops.gather(own))
        self._reduce_exact(average)

    @torch.no_grad()
    def reduce_scatter(self, *, average: bool = True) -> GradientShards:
        """Sum or average over ranks; return this rank's part in float32, not rounded again. Collective.

        What is stored stays each rank's own; call :meth:`reset` when the shards have been used.

        Raises:
            RuntimeError: they are reduced already.
        """
        self._begin("scattered")
        rank = 0 if self._hops is None else self._hops.rank
        parts: dict[str, tuple[slice, Tensor]] = {}
        for bucket in self._buckets:
            if self._hops is None or self._hops.size == 1:
                total = bucket.shards.decode()[0]
            else:
                total = self._hops.scatter_sum(bucket.shards, generator=self.reducer.generator)
                total.div_(self.size if average else 1)
            for name in bucket.names:
                numbers, place = bucket.inside(name, rank)
                if numbers.stop > numbers.start:
                    parts[name] = (numbers, total[place])
        self._reduce_exact(average)
        return GradientShards(parts, dict(self._exact), self._group, rank, self.size)

    def _begin(self, state: str) -> None:
        if self.state != "local":
            raise RuntimeError(f"the gradients are {self.state} already: call reset() before the next step")
        self.state = state

    def _readable(self) -> None:
        if self.state == "scattered":
            raise RuntimeError("the sum is in the shards that reduce_scatter returned: read and clip those")

    def _reduce_exact(self, average: bool) -> None:
        if self._flat.numel() and self.size > 1:
            ExactReducer().all_reduce(self._flat, average=average, group=self._group)


def _fill(parameters: Mapping[str, Parameter], limit: int) -> list[list[str]]:
    """Names in buckets of at most ``limit`` numbers, or of one parameter."""
    buckets: list[list[str]] = []
    room = 0
    for name, parameter in parameters.items():
        if not buckets or parameter.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(name)
        room -= parameter.numel()
    return buckets
