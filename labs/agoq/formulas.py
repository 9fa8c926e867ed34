"""Bytes that the lab expects, from shapes alone: held for backward, gradients, and on the wire.

Everything here is arithmetic on whole numbers, written apart from the code that is counted. Activations: what one
decoder layer keeps under a plan, and what stands around the layers. Gradients: blocks by parameter, filled up to equal
shards. Those of the optimizer's state are :func:`dist_lib.agoq.moment_bytes`. Source of the schemes: AGoQ (arXiv
2605.00539); the counts are ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dist_lib.agoq import ActivationPlan, GradientFormat, wire_bytes
from dist_lib.comm import NetworkModel
from dist_lib.models import DecoderConfig, activation_bytes
from dist_lib.ops import quantized_nbytes

SCALE_BYTES = 4


def encoded_layer_bytes(config: DecoderConfig, batch: int, seq: int, plan: ActivationPlan, element: int) -> int:
    """Bytes that one layer holds for backward when its activations are encoded.

    Args:
        config: of the model.
        batch, seq: tokens.
        plan: formats and layout, one codec.
        element: bytes of a number that is not encoded: 4 or 2.
    """
    c, tokens = config, batch * seq
    widths = [c.d_model, c.d_model, c.d_ff, c.d_ff] + ([c.d_model] if plan.layout == "paper" else [])
    codes = sum(quantized_nbytes((tokens, w), str(plan.codec), plan.block_size, plan.scale_dtype) for w in widths)
    kept = 4 * c.d_model  # rotated queries and keys, values (each repeated to all heads), attention's output
    if plan.layout == "paper" and c.n_kv_heads == c.n_heads:
        kept += 2 * c.d_model  # the values are a view of one buffer with queries and keys
    angles = 0 if element == 4 else 4 * seq * c.head_dim * element  # rotation casts the table for every layer
    return codes + tokens * (kept * element + 4 * c.n_heads + 2 * 4) + angles


def plain_layer_bytes(config: DecoderConfig, batch: int, seq: int, element: int) -> int:
    """The same of a layer as it is: norms keep their float32 input and two results, SwiGLU its four tensors."""
    c, tokens = config, batch * seq
    norm = 4 * c.d_model + 2 * element * c.d_model + 4  # its input in float32; normalised, and times the gain; 1 / rms
    rest = (4 * c.d_model + 4 * c.d_ff) * element + 4 * c.n_heads
    angles = 0 if element == 4 else 4 * seq * c.head_dim * element
    return tokens * (2 * norm + rest) + angles


def around_bytes(config: DecoderConfig, batch: int, seq: int, element: int) -> int:
    """What is held beside the layers: tokens, targets, rotary table, last norm, and log-probabilities in float32."""
    plain = activation_bytes(config, batch, seq) - config.n_layers * plain_layer_bytes(config, batch, seq, 4)
    if element == 4:
        return plain
    table = 2 * seq * config.head_dim * 4  # cast by every layer, so nobody keeps it
    return plain - table - batch * seq * 2 * config.d_model * (4 - element)


def held_bytes(config: DecoderConfig, batch: int, seq: int, plan: ActivationPlan | None, element: int = 4) -> int:
    """Bytes that the whole model and its loss hold for backward after one forward pass, parameters left out.

    Args:
        config: of the model.
        batch, seq: tokens.
        plan: None: nothing is encoded.
        element: bytes of a number that is not encoded: 4 or 2.
    """
    layer = (
        plain_layer_bytes(config, batch, seq, element)
        if plan is None
        else encoded_layer_bytes(config, batch, seq, plan, element)
    )
    return config.n_layers * layer + around_bytes(config, batch, seq, element)


def split_sizes(numels: Iterable[int], min_elements: int) -> tuple[list[int], list[int]]:
    """Sizes of the parameters whose gradients are encoded, and of those that are left in float32."""
    sizes = list(numels)
    return [n for n in sizes if n >= min_elements], [n for n in sizes if n < min_elements]


def _shard_length(large: list[int], form: GradientFormat, world: int) -> int:
    """Numbers in a rank's shard of one bucket: whole blocks, none of which spans two parameters."""
    blocks = sum(-(-n // form.block_size) for n in large)
    return -(-blocks // world) * form.block_size


def gradient_bytes(numels: Iterable[int], form: GradientFormat | None, min_elements: int, world: int) -> int:
    """Bytes of a step's gradients while micro-batches are added: 4 a number, or codes and scales (one bucket)."""
    sizes = list(numels)
    if form is None:
        return 4 * sum(sizes)
    large, small = split_sizes(sizes, min_elements)
    length = _shard_length(large, form, world)
    return world * (length + SCALE_BYTES * (length // form.block_size)) + 4 * sum(small)


def payload_bytes(numels: Iterable[int], form: GradientFormat | None, min_elements: int, world: int) -> int:
    """Bytes that a rank hands to collectives for the gradients of one step, replicated weights."""
    sizes = list(numels)
    if world == 1:
        return 0
    if form is None:
        return 4 * sum(sizes)
    large, small = split_sizes(sizes, min_elements)
    message = form.message_bytes(_shard_length(large, form, world)) if large else 0
    return (world + 1) * message + 4 * sum(small)


def sent_bytes(numels: Iterable[int], form: GradientFormat | None, min_elements: int, world: int) -> int:
    """Bytes that leave a rank in one step, float32 sums by a ring; replicated weights."""
    sizes = list(numels)
    if form is None:
        return round(NetworkModel.wire_bytes("all_reduce", 4 * sum(sizes), world))
    large, small = split_sizes(sizes, min_elements)
    length = _shard_length(large, form, world)
    exact = round(NetworkModel.wire_bytes("all_reduce", 4 * sum(small), world))
    return wire_bytes("all_reduce", world * length, world, form).sent + exact


def sharded_payload_bytes(
    modules: Iterable[list[torch.Size]], form: GradientFormat | None, min_elements: int, world: int
) -> int:
    """Bytes that a rank hands to collectives for the gradients of one micro-batch under FSDP2.

    Args:
        modules: shapes of the parameters of each module that is sharded by itself.
        form: None: float32.
        min_elements: modules with fewer numbers are reduced in float32.
        world: ranks.
    """
    if world == 1:
        return 0
    total = 0
    for shapes in modules:
        numel = sum(-(-s[0] // world) * world * (s.numel() // s[0]) for s in shapes)  # rows filled up to equal shards
        exact = form is None or numel < min_elements
        total += 4 * numel if exact else world * form.message_bytes(numel // world)  # type: ignore[union-attr]
    return total
