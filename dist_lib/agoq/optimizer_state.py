"""AdamW whose two moments are held in 8 bits: bitsandbytes' optimizer, its bytes counted and predicted.

It is the O of AGoQ (arXiv 2605.00539) and not the paper's own: block-wise 8-bit moments are of Dettmers et al. (arXiv
2110.02861), one float32 scale for 256 numbers and a table of codes for all. Tensors of fewer than 4096 numbers keep
float32 moments. Master weights stay as they are, and so does the update, which decodes, steps and encodes block by
block. :func:`~dist_lib.agoq.ablation` trains a small decoder with any of O, G and A, and counts what each holds; it
says nothing about speed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from dist_lib.agoq.convert import ActivationPlan, quantize_activations
from dist_lib.agoq.gradients import QuantizedGradients
from dist_lib.agoq.reducer import QuantizedReducer
from dist_lib.agoq.wire import GradientFormat
from dist_lib.models import Decoder, DecoderConfig, SavedTensorCounter

SMALL = 4096  # tensors of fewer numbers keep float32 moments
BLOCK = 256  # numbers that share a scale
CODE_TABLES = 2 * 256 * 4  # one for each moment, shared by all tensors of an optimizer
PIECES = "OGA"


def adamw_8bit(
    parameters: Iterable[Parameter] | Iterable[dict[str, Any]],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """AdamW with 8-bit moments, on CPU and GPU.

    Args:
        parameters: float32 tensors, or groups of them, as for :class:`torch.optim.AdamW`.
        lr, betas, eps, weight_decay: as there.

    Raises:
        ImportError: bitsandbytes is missing; the message names the extra that brings it.
    """
    # It warns that a kernel for 4-bit products is missing, which is not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        module: Any = importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise ImportError(
            "8-bit optimizer state needs bitsandbytes, which is not installed: pip install 'dist-lib[agoq]', or take "
            "torch.optim.AdamW"
        ) from error
    made: Optimizer = module.AdamW8bit(
        parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, min_8bit_size=SMALL
    )
    return made


def moment_bytes(sizes: Iterable[int], *, bits: int = 8) -> int:
    """Bytes of Adam's two moments, from the numbers of elements of its tensors.

    With 8 bits: 2 bytes for each number and 8 for each block of 256, the last of which may be short, and 2 kB for the
    tables of codes; 8 bytes for each number of a tensor below 4096.

    Args:
        sizes: elements of each tensor.
        bits: 8 or 32.

    Raises:
        ValueError: other bits, or a negative size.
    """
    counts = list(sizes)
    if bits not in (8, 32) or any(n < 0 for n in counts):
        raise ValueError(f"{bits} bits for tensors of {counts} elements: give 8 or 32 bits, and no negative sizes")
    if bits == 32:
        return 8 * sum(counts)
    large = [n for n in counts if n >= SMALL]
    coded = sum(2 * n + 8 * -(-n // BLOCK) for n in large)
    return coded + 8 * sum(n for n in counts if n < SMALL) + (CODE_TABLES if large else 0)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes that an optimizer's state holds now: storages once, counters of steps left out; before a step, none."""
    held = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.ndim]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


@dataclass(frozen=True)
class Ablation:
    """One training run of :func:`ablation`.

    Attributes:
        pieces: what was on: any of O (8-bit moments), G (8-bit main gradients), A (encoded activations).
        activation_bytes: held for the first backward pass.
        gradient_bytes: of the main gradients.
        moment_bytes: of the optimizer's state.
        losses: of every step, before its update.
    """

    pieces: str
    activation_bytes: int
    gradient_bytes: int
    moment_bytes: int
    losses: tuple[float, ...]


def ablation(
    config: DecoderConfig,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    pieces: Sequence[str] = ("", "O", "G", "A", "OGA"),
    plan: ActivationPlan | None = None,
    form: GradientFormat | None = None,
    lr: float = 1e-3,
    seed: int = 0,
) -> list[Ablation]:
    """Train the same decoder on the same batches with each choice of pieces, in this process.

    Tensors of fewer than 4096 numbers keep float32 gradients as well as float32 moments.

    Args:
        config: of the decoder; float32.
        batches: one step each, (tokens, targets), (B, S) int64.
        pieces: choices; the empty one is the baseline.
        plan: of A; default: fp4 in blocks of 128.
        form: of G; default: int8 in blocks of 256.
        lr: of AdamW.
        seed: of the initial weights.

    Raises:
        ValueError: no batches, or a letter that is none of O, G, A.
        ImportError: O without bitsandbytes.
    """
    if not batches:
        raise ValueError("no batches: give one (tokens, targets) for each step")
    if odd := [p for p in pieces if set(p) - set(PIECES) or len(set(p)) != len(p)]:
        raise ValueError(f"pieces {odd} are not some of the letters {', '.join(PIECES)}, each once")
    return [_train(config, batches, p, plan or ActivationPlan(), form or GradientFormat(), lr, seed) for p in pieces]


def _train(
    config: DecoderConfig,
    batches: Sequence[tuple[Tensor, Tensor]],
    pieces: str,
    plan: ActivationPlan,
    form: GradientFormat,
    lr: float,
    seed: int,
) -> Ablation:
    model = Decoder(config, seed=seed)
    parameters = list(model.parameters())
    optimizer = adamw_8bit(parameters, lr=lr) if "O" in pieces else AdamW(parameters, lr=lr)
    if "A" in pieces:
        quantize_activations(model, plan)
    coded = (
        QuantizedGradients(model.named_parameters(), QuantizedReducer(form, min_elements=SMALL))
        if "G" in pieces
        else None
    )
    if coded is not None:
        coded.attach()
    losses, activations = [], 0
    for step, (tokens, targets) in enumerate(batches):
        if step == 0:
            with SavedTensorCounter(model) as counter:
                loss = model.loss(tokens, targets)
            activations = counter.bytes
        else:
            loss = model.loss(tokens, targets)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        if coded is not None:
            coded.assign()
            coded.reset()
        optimizer.step()
        optimizer.zero_grad()
    held = coded.nbytes if coded is not None else sum(p.nbytes for p in parameters)
    return Ablation(pieces, activations, held, state_bytes(optimizer), tuple(losses))
