"""PULSELoCo: DiLoCo whose workers send only what the forward pass's cast can see, and keep the rest for later.

After section 3 and algorithm 2 of *Understanding and Exploiting Weight Update Sparsity for Communication-Efficient
Distributed RL* (arXiv:2602.03839). Each worker adds its pseudo-gradient to an FP32 error-feedback buffer, sends those
coordinates whose bits differ between the casts of ``theta`` and of ``theta - s``, as FP32 values that are never
rounded, and keeps the others. What is sent and what is kept add up to ``s`` exactly, in every coordinate. All workers
take the same Nesterov step from the same sums in rank order, so their weights stay equal bit for bit, which a digest
proves.

A worker whose pseudo-gradient is not finite contributes nothing to that round: it keeps its former buffer, returns to
the agreed weights and empties its inner optimizer; the mean still divides by all workers. A worker that dies is an
error on the others; start again from a checkpoint (:mod:`~dist_lib.pulse.loco_checkpoint`), with any number of workers.

>>> import torch
>>> from dist_lib.comm import distributed
>>> from dist_lib.pulse import OuterConfig, PulseLoCo
>>> _ = torch.manual_seed(0)
>>> model = torch.nn.Linear(64, 64)  # the same first weights on every worker
>>> inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
>>> with distributed(device="cpu") as ctx:  # or under torchrun, or in dist_lib.comm.launch
...     loop = PulseLoCo(model, inner, OuterConfig(inner_steps=4))
...     data = torch.Generator().manual_seed(1 + ctx.rank)  # each worker has its own
...     while loop.rounds < 3:
...         inner.zero_grad()
...         x = torch.randn(8, 64, generator=data)
...         (model(x) - x).square().mean().backward()
...         metrics = loop.step()  # None within a round
...     before = loop.error.count_nonzero().item()
>>> metrics.round, metrics.cells, metrics.dropped
(3, 4160, ())
>>> 0 < metrics.gate_density < 1 and metrics.payload_bytes < metrics.dense_bytes and before > 0
True
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_lib.pulse.codecs import SEGMENT, kernels
from dist_lib.pulse.loco_config import OuterConfig, RoundMetrics, sparse_counted_bytes, sparse_wire_bytes
from dist_lib.pulse.loco_loop import OuterLoop
from dist_lib.pulse.loco_payload import SparseUpdate, decode_update, encode_update, payload_bound
from dist_lib.pulse.sparsity_measures import visible
from dist_lib.pulse.wire import pack


def gate(theta: Tensor, s: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
    """Which coordinates are sent: where the casts of ``theta`` and of ``theta - s`` differ in bits (paper, Eq. 1).

    Args:
        theta: agreed weights, float32, any shape.
        s: pseudo-gradient plus error feedback, same shape.
        dtype: of the cast; None opens the gate for all.

    Returns:
        Boolean mask of the same shape.
    """
    return torch.ones_like(s, dtype=torch.bool) if dtype is None else visible(theta, s, dtype)


def feedback(s: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``s`` into what is sent and what is kept; one of the two is zero in each coordinate, the other is ``s``.

    Args:
        s: float32, any shape.
        mask: of :func:`gate`.
    """
    return s.masked_fill(~mask, 0.0), s.masked_fill(mask, 0.0)


class PulseLoCo(OuterLoop):
    """The outer loop with a gate, error feedback and coded updates.

    Arguments, attributes and errors are those of :class:`~dist_lib.pulse.loco_loop.OuterLoop`; it holds 12 bytes a
    parameter beside the model. Updates are gathered whole: a round needs room for those of all workers.

    Raises:
        MissingPackageError: numba or zstandard is not installed.

    Attributes:
        error: this worker's error-feedback buffer, 1-D float32; private, and part of its state.
    """

    method = "pulse"
    _private = ("error",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: OuterConfig | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        kernels()
        pack(b"")  # both packages are needed: better found missing now than in the first round
        super().__init__(model, optimizer, config, group)
        self.error = torch.zeros_like(self.theta)

    def adopt(self, error: Tensor) -> None:
        """Add the buffer of a worker that is gone to this one's, so that what it had not sent is not lost.

        Args:
            error: float32, 1-D, as long as ``theta``.
        """
        self.error += error.to(self.error.device)

    def _select(self, s: Tensor) -> SparseUpdate:
        """Pass the gate; ``error`` becomes what is kept."""
        segments = []
        for theta, s_part, error in zip(*(t.split(SEGMENT) for t in (self.theta, s, self.error)), strict=True):
            mask = gate(theta, s_part, self.config.gate_dtype)
            positions = mask.nonzero().view(-1)
            values = s_part[positions].cpu().numpy()
            segments.append((positions.to(torch.int32).cpu().numpy().view("u4"), values))
            error.copy_(feedback(s_part, mask)[1])
        return SparseUpdate(self.rounds, self.channel.rank, self.cells, tuple(segments))

    def _add(self, g: Tensor, touched: Tensor, update: SparseUpdate) -> None:
        parts = zip(g.split(SEGMENT), touched.split(SEGMENT), update.segments, strict=True)
        for g_part, touched_part, (positions, values) in parts:
            where = torch.from_numpy(positions.astype("i8")).to(g.device)
            g_part[where] += torch.from_numpy(values).to(g.device)  # positions are distinct
            touched_part[where] = True

    def _close_round(self) -> RoundMetrics:
        s = (self.theta - self._weights()).add_(self.error)
        finite = bool(torch.isfinite(s).all())
        update = self._select(s) if finite else None
        payload = encode_update(update) if update else b""
        del s
        sizes, dropped = self._contributors(len(payload) if finite else -1)
        if not finite:
            self._forget_inner()
        g, touched = torch.zeros_like(self.theta), torch.zeros_like(self.theta, dtype=torch.bool)
        messages = self.channel.gather(payload, sizes, payload_bound(self.cells))
        for rank, message in enumerate(messages):
            if rank not in dropped:
                self._add(g, touched, decode_update(message, round=self.rounds, rank=rank, cells=self.cells))
        union = int(touched.count_nonzero())
        del messages, touched
        self._outer_step(g)
        digest = self._finish()
        return RoundMetrics(
            round=self.rounds,
            workers=self.channel.workers,
            dropped=dropped,
            cells=self.cells,
            sent_cells=update.sent if update else 0,
            union_cells=union,
            payload_bytes=len(payload),
            counted_bytes=sparse_counted_bytes(max(0, *sizes), digest=bool(digest)),
            wire_bytes=sparse_wire_bytes(max(0, *sizes), self.channel.workers, digest=bool(digest)),
            error_norm=float(torch.linalg.vector_norm(self.error, dtype=torch.float64)),
            digest=digest,
        )
