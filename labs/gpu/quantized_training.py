"""GPU checks of training with codes: the peak of a stack of layers against a formula, and 8-bit messages through NCCL.

The peak is what one forward and backward pass allocates beside weights, gradients and its input: what the layers hold,
and what the dearest operation needs at the worst moment. One rank alone cannot test a link; what is tested is that
encoding, packing, NCCL's exchange of bytes, the float32 sum, and decoding give the bits that a CPU gives.

On a CPU the same checks run with a count of live tensors in place of the allocator's (:class:`LiveBytes`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dist_lib.agoq import ActivationPlan, GradientFormat, quantize_activations
from dist_lib.agoq.collectives import sum_and_encode
from dist_lib.agoq.wire import Hops, Shards
from dist_lib.comm import CommCounter, distributed
from dist_lib.models import DecoderConfig
from dist_lib.models.decoder import rotary_table
from labs.agoq.formulas import encoded_layer_bytes, plain_layer_bytes
from labs.gpu.quantization import EIGHT_B, random_model, same_bits
from labs.gpu_check import GpuReport

STACK = dataclasses.replace(EIGHT_B, n_layers=4, n_kv_heads=8)
TOLERANCE = 0.05
ROOM = 1.3  # of the formula, must be free for the check to run


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive: what an allocator sees, operation by operation.

    Args:
        known: tensors that are not counted.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._seen = {self._key(t) for t in known}

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages that it made."""
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and self._key(tensor) not in self._seen:
                storage = tensor.untyped_storage()
                key, size = self._key(tensor), storage.nbytes()
                self._seen.add(key)
                self.now += size
                weakref.finalize(storage, self._forget, key, size)
        self.peak = max(self.peak, self.now)
        return out


def peak_bytes(fn: Callable[[], Any], known: Sequence[Tensor]) -> int:
    """Most bytes that a call allocates beside ``known``, on their device."""
    if known[0].is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before
    live = LiveBytes(known)
    with live:
        fn()
    return live.peak


def peak_formula(config: DecoderConfig, seq: int, plan: ActivationPlan | None) -> int:
    """Bytes that a stack of bfloat16 layers needs for one forward and backward pass of one sequence, at the worst.

    All layers are full when the last one begins its backward pass. Then the stack's output is still there, and, of the
    width of the MLP: with codes four tensors (the gradient that arrives and the three that the fused kernel returns),
    without codes two. Holds for sequences of at least ``2 d_model`` tokens (with shorter ones the weights' gradients
    set the peak), and for layers whose rotary table is bfloat16 already.

    Args:
        config: of the layers; ``d_ff`` at least ``2 d_model``.
        seq: tokens.
        plan: None: plain layers.
    """
    hidden, wide, angles = 2 * seq * config.d_model, 2 * seq * config.d_ff, 8 * seq * config.head_dim
    if plan is None:
        return config.n_layers * (plain_layer_bytes(config, 1, seq, 2) - angles) + hidden + 2 * wide
    layer = encoded_layer_bytes(config, 1, seq, plan, 2) - angles
    return config.n_layers * layer + hidden + 4 * wide


def check_peak(report: GpuReport, device: str, config: DecoderConfig = STACK, seq: int = 8192) -> None:
    """Peak of the stack without codes and with, each within 5 % of the formula, and their difference, too."""
    formulas = [peak_formula(config, seq, plan) for plan in (None, ActivationPlan("fp4", 128))]
    if device == "cuda":
        weights = 4 * config.n_layers * (4 * config.d_model**2 + 3 * config.d_model * config.d_ff)  # and gradients
        if torch.cuda.mem_get_info()[0] < ROOM * (max(formulas) + weights):
            report.add("peak of a stack", "left out: this GPU has too little memory for it")
            return
    measured = [_peak_of_stack(device, config, seq, plan) for plan in (None, ActivationPlan("fp4", 128))]
    what = f"{config.n_layers} layers, d {config.d_model}, S {seq}"
    for name, ours, formula in zip(("plain layers", "4-bit codes"), measured, formulas, strict=True):
        text = f"{ours / 1e9:.3f} GB, formula {formula / 1e9:.3f} GB"
        close = abs(ours / formula - 1) < TOLERANCE
        report.check(f"peak of {what}, {name}", close, text, peak=ours, formula=formula)
    saved, expected = measured[0] - measured[1], formulas[0] - formulas[1]
    text = f"{saved / 1e9:.3f} GB, formula {expected / 1e9:.3f} GB"
    report.check(f"saved by codes, {what}", abs(saved / expected - 1) < TOLERANCE, text, saved=saved, formula=expected)


def _peak_of_stack(device: str, config: DecoderConfig, seq: int, plan: ActivationPlan | None) -> int:
    model = random_model(config, device)
    x = torch.randn(1, seq, config.d_model, device=device).bfloat16().requires_grad_()
    gradient = torch.randn_like(x)
    if plan is not None:
        quantize_activations(model, plan)
    cos, sin = (t.bfloat16() for t in rotary_table(config, seq, torch.device(device)))

    def step() -> None:
        y = x
        for layer in model.layers:
            y = layer(y, cos, sin)
        y.backward(gradient)

    step()  # makes the gradients and what libraries keep
    gradients = [p.grad for p in (*model.layers.parameters(), x) if p.grad is not None]
    return peak_bytes(step, [x, gradient, cos, sin, *model.parameters(), *gradients])


def check_messages(report: GpuReport, device: str, numel: int = 2**20 + 77) -> None:
    """Gradients through 8-bit messages on one rank: NCCL (gloo on a CPU) moves bytes, the result has a CPU's bits."""
    with distributed(device=device) as ctx:
        for form in (GradientFormat("int8", 256), GradientFormat("dynamic8", 256), GradientFormat("e4m3", 128)):
            x = torch.randn(1, numel) * torch.exp(2 * torch.randn(1, numel))
            x[0, 5] = float("nan")
            with CommCounter() as counter:
                found = _through_messages(x.to(ctx.device), form)
            expected = Shards.encode(Shards.encode(x, form).decode(), form).decode()
            same = same_bits(found, expected) and bool(found[0, 5].isnan())
            report.check(f"{form.codec}/{form.block_size} messages over {ctx.backend}: a CPU's bits", same)
            wanted = 2 * form.message_bytes(numel)
            text = f"{counter.bytes()} bytes, formula {wanted}"
            report.check(f"{form.codec}/{form.block_size} messages: bytes", counter.bytes() == wanted, text)


def _through_messages(x: Tensor, form: GradientFormat) -> Tensor:
    """What an 8-bit all-reduce does with (1, numel), its hops included, although there is one rank."""
    hops = Hops()
    own = sum_and_encode(Shards.encode(x, form), hops, 1)
    return Shards.unpack(hops.gather(own), x.shape[1], form).decode()


def time_messages(report: GpuReport, numel: int = 2**28) -> None:
    """The 8-bit path on one rank, bytes counted, beside the copy of this run."""
    form = GradientFormat("int8", 256)
    with distributed(device="cuda"):
        x = torch.randn(1, numel, device="cuda")
        message = form.message_bytes(numel)
        # encode, pack, exchange, unpack and decode, encode, pack, gather, unpack and decode
        moved = 3 * 4 * numel + 4 * numel + 12 * message
        ours = report.time(lambda: _through_messages(x, form), samples=5)
        report.row(f"8-bit messages, {numel / 2**20:g} Mi numbers, one rank", ours, nbytes=moved)


def run(report: GpuReport) -> None:
    """All checks, then the time of the messages."""
    check_messages(report, "cuda")
    check_peak(report, "cuda")
    try:
        time_messages(report)
    except torch.cuda.OutOfMemoryError:
        report.add("8-bit messages", "not timed: this GPU has too little memory for it")
