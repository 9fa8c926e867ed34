"""GPU checks of the pipeline's arithmetic: two stages in one process, each on a stream of its own.

The order of work is the library's never-flushed schedule, the weights are kept by the library's two banks, and the
result is compared with the single-process twin on the same device. A stage waits for its neighbour by events only, so
a missing wait, or a bank that is overwritten while a kernel still reads it, shows up as another number. Whether two
streams are faster than one on a single GPU depends on how much of it one stage fills; both times are reported.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dist_lib.async_pipeline import (
    Action,
    AsyncConfig,
    DelayedTrainer,
    ErrorFeedback,
    make_schedule,
    numerics,
    split_decoder,
    validate,
)
from dist_lib.async_pipeline.versions import WeightVersions
from dist_lib.models import Decoder, DecoderConfig
from labs.gpu_check import GpuReport

SMALL = DecoderConfig(
    vocab_size=256,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=128,
    max_seq_len=32,
    tie_embeddings=False,
)
LARGE = dataclasses.replace(
    SMALL, vocab_size=1024, d_model=1024, n_layers=8, n_heads=8, n_kv_heads=8, d_ff=2816, max_seq_len=256
)
Batch = tuple[Tensor, Tensor]
Maker = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer of one stage."""
    return torch.optim.AdamW([p for _, p in named], lr=2e-3, betas=(0.9, 0.95))


class _Lane:
    """One stage on one stream: its weights, its sums, and the events that others wait for."""

    def __init__(self, module: nn.Module, device: torch.device, *, streams: bool) -> None:
        self.versions = WeightVersions(module, 2)
        self.optimizer = ErrorFeedback(adamw(self.versions.parameters))
        self.sums: dict[int, list[Tensor | None]] = {}  # by batch: an update comes late, the next batch has begun
        self.stream = torch.cuda.Stream(device) if streams and device.type == "cuda" else None

    def on(self) -> AbstractContextManager[Any]:
        """Put what follows onto this stage's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def done(self) -> torch.cuda.Event | None:
        """An event after everything issued so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Do nothing further before the event."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)


class TwoStreams:
    """Runs the never-flushed schedule of two stages from one thread.

    Args:
        model: cut into two stages; its embeddings must not be tied.
        micro_batches: of a batch, at least 2.
        streams: give each stage a stream of its own; otherwise both share the current one.
    """

    def __init__(self, model: Decoder, *, micro_batches: int, streams: bool = True) -> None:
        self.device = next(model.parameters()).device
        self.micro_batches = micro_batches
        self.lanes = [_Lane(stage, self.device, streams=streams) for stage in split_decoder(model, 2)]
        self.order: list[Action] = []
        self._held: dict[tuple[int, int, int], Any] = {}

    def run(self, batches: list[Batch]) -> None:
        """Train on all batches and drain; the lanes then hold the newest weights."""
        schedule = make_schedule("2bw", stages=2, micro_batches=self.micro_batches, batches=len(batches))
        parts = [[numerics.split_batch(t, self.micro_batches) for t in batch] for batch in batches]
        for lane in self.lanes:
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        for action in validate(schedule).order:
            inputs, targets = (part[action.micro_batch] for part in parts[action.batch])
            with self.lanes[action.stage].on():
                if action.kind == "forward":
                    self._forward(action, inputs, targets)
                elif action.kind == "backward":
                    self._backward(action)
                else:
                    self._update(action)
        for lane in self.lanes:
            if lane.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(lane.stream)

    def _forward(self, action: Action, inputs: Tensor, targets: Tensor) -> None:
        lane, place = self.lanes[action.stage], (action.batch, action.micro_batch)
        x = inputs
        if action.stage == 1:
            sent, event = self._held.pop((0, *place))
            lane.wait(event)
            x = sent.detach().requires_grad_()
        output = lane.versions.forward(action.version, x)
        if action.stage == 0:
            self._held[(0, *place)] = (output, lane.done())
            self._held[(2, *place)] = output  # kept for its own backward
        else:
            self._held[(1, *place)] = (x, cross_entropy(output, targets))

    def _backward(self, action: Action) -> None:
        lane, place = self.lanes[action.stage], (action.batch, action.micro_batch)
        if action.stage == 1:
            x, loss = self._held.pop((1, *place))
            loss.backward()
            self._held[(3, *place)] = (x.grad, lane.done())
        else:
            gradient, event = self._held.pop((3, *place))
            lane.wait(event)
            torch.autograd.backward(self._held.pop((2, *place)), gradient)
        sums = lane.sums.setdefault(action.batch, [None] * len(lane.versions.names))
        numerics.accumulate(sums, lane.versions.release(action.version))

    def _update(self, action: Action) -> None:
        lane = self.lanes[action.stage]
        sums = lane.sums.pop(action.batch)
        numerics.average(sums, self.micro_batches)
        lane.versions.advance(sums, lane.optimizer.step)

    def weights(self) -> dict[str, Tensor]:
        """Newest weights by name."""
        return {name: p.detach() for lane in self.lanes for name, p in lane.versions.parameters}


def random_batches(config: DecoderConfig, count: int, rows: int, device: str) -> list[Batch]:
    """Random tokens, drawn anew in every run."""
    shape = (2, count, rows, config.max_seq_len)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    return [(tokens[0, k], tokens[1, k]) for k in range(count)]


def check_equal(report: GpuReport, device: str, config: DecoderConfig = SMALL, *, rows: int = 8) -> None:
    """Two streams against the single-process twin; equal bits where the device's kernels repeat themselves."""
    batches = random_batches(config, 6, rows, device)
    model = Decoder(config, seed=0).to(device)
    runner = TwoStreams(model, micro_batches=4)
    runner.run(batches)
    trainer = DelayedTrainer(
        split_decoder(Decoder(config, seed=0).to(device), 2),
        loss_fn=cross_entropy,
        make_optimizer=adamw,
        config=AsyncConfig(micro_batches=4, error_feedback=True),
    )
    trainer.run(batches)
    twin = {name: p.detach() for stage in trainer.parameters_by_stage() for name, p in stage.items()}
    found = runner.weights()
    start = dict(Decoder(config, seed=0).to(device).named_parameters())
    moved = max(float((twin[n] - start[n].detach()).abs().max()) for n in twin)
    apart = max(float((found[n] - twin[n]).abs().max()) for n in twin)
    equal = sum(torch.equal(found[n], twin[n]) for n in twin)
    text = f"{equal} of {len(twin)} weights have the same bits; largest difference {apart:.1e} of {moved:.1e} moved"
    good = found.keys() == twin.keys() and moved > 0 and apart <= 1e-3 * moved
    report.check("two stages on two streams equal their twin", good, text, equal=equal, apart=apart, moved=moved)


def time_streams(report: GpuReport, config: DecoderConfig = LARGE, *, rows: int = 8, micro_batches: int = 8) -> None:
    """Seconds of a batch with one stream and with two."""
    batches = random_batches(config, 6, rows * micro_batches, "cuda")
    seconds = {}
    for name, streams in (("one stream", False), ("two streams", True)):
        for part in (batches[:2], batches):  # the first warms up
            runner = TwoStreams(Decoder(config, seed=0).to("cuda"), micro_batches=micro_batches, streams=streams)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            runner.run(part)
            torch.cuda.synchronize()
        seconds[name] = (time.perf_counter() - begin) / len(batches)
    ratio = seconds["one stream"] / seconds["two streams"]
    text = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in seconds.items()) + f" a batch, ratio {ratio:.2f}"
    report.add("two stages of one model on one GPU", text, None, ratio=ratio, **seconds)


def run(report: GpuReport) -> None:
    """All checks, on the current GPU."""
    torch.manual_seed(int(time.time()))
    check_equal(report, "cuda")
    check_equal(report, "cuda", LARGE, rows=8)
    if report.seconds_left() > 30:
        time_streams(report)
