"""Several gradients in one buffer of codes, so that they are sent together: each begins a block of its own.

A block never spans two parameters: a norm's few large numbers do not coarsen a matrix beside them. Room that is left
over, at the end of a gradient's last block and of the buffer, holds zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dist_lib.agoq.wire import GradientFormat, Shards
from dist_lib.ops import Quantized, quantize, quantized_zeros


class Bucket:
    """Where each of several gradients lies in a buffer of codes that is cut into equal shards of whole blocks.

    Args:
        shapes: of the gradients, by name, in order.
        form: how they are coded.
        parts: number of shards.
        device: of the buffer.

    Attributes:
        shards: the buffer, at first zeros; replaced by :meth:`take`.
        length: numbers in a shard, those that fill it up included.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], form: GradientFormat, parts: int, device: torch.device
    ) -> None:
        self.form, self._shapes = form, dict(shapes)
        self._starts: dict[str, int] = {}
        blocks = 0
        for name, shape in self._shapes.items():
            self._starts[name] = blocks * form.block_size
            blocks += form.blocks(shape.numel())
        self.length = -(-blocks // parts) * form.block_size
        zeros = quantized_zeros((parts, self.length), form.codec, form.block_size, device=device, flat=False)
        # The codes of zeros, not zero bytes: what fills a block up must stay zero once the block has a scale.
        self._zero = int(quantize(torch.zeros(1), form.codec, form.block_size).codes.item())
        self.shards = Shards(zeros.codes, zeros.scales, form)
        self.zero_()

    @property
    def names(self) -> list[str]:
        """Names, in order."""
        return list(self._shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.shards.codes.nbytes + self.shards.scales.nbytes

    def zero_(self) -> None:
        """Forget all numbers, a NaN included."""
        self.shards.codes.fill_(self._zero)
        self.shards.scales.zero_()

    def span(self, name: str) -> slice:
        """Where its numbers lie in the buffer as one row."""
        start = self._starts[name]
        return slice(start, start + self._shapes[name].numel())

    def view(self, name: str) -> Quantized:
        """One gradient, as a view of the buffer."""
        span, size = self.span(name), self.form.block_size
        codes = self.shards.codes.view(-1)[span]
        scales = self.shards.scales.view(-1)[span.start // size : span.start // size + self.form.blocks(codes.numel())]
        return Quantized(codes, scales, self._shapes[name], torch.float32, self.form.codec, size, flat=True)

    def put(self, name: str, gradient: Tensor, generator: torch.Generator | int | None = None) -> None:
        """Encode one gradient into the buffer."""
        form, view = self.form, self.view(name)
        q = quantize(gradient, form.codec, form.block_size, rounding=form.rounding, generator=generator, flat=True)
        view.codes.copy_(q.codes)
        view.scales.copy_(q.scales)

    def take(self, rows: Tensor) -> None:
        """Replace the buffer by messages (parts, ``message_bytes``)."""
        self.shards = Shards.unpack(rows, self.length, self.form)

    def inside(self, name: str, part: int) -> tuple[slice, slice]:
        """Of gradient ``name`` and shard ``part``: the numbers of the gradient in it, and where they lie in it."""
        span, start = self.span(name), part * self.length
        low, high = max(span.start, start), min(span.stop, start + self.length)
        high = max(low, high)
        return slice(low - span.start, high - span.start), slice(low - start, high - start)
