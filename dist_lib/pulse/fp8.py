"""Receivers that hold FP8: blocks of E4M3 numbers with one scale each, patched so that they equal a full quantisation.

Two designs. Either the trainer quantises and publishes the payload and the scales as tensors of their own
(:func:`quantise_state`): the patch then carries changed bytes, and receivers apply it like any other. Or the receiver
gets bfloat16 patches, keeps that state as a shadow on the CPU and quantises again only the blocks in which a cell
changed (:class:`Fp8Shadow`). Scales are powers of two by default: they change only when a block's largest weight passes
a power of two, while float32 scales follow every change of it. Two-dimensional weights are quantised, all else stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse.errors import StateError
from dist_lib.pulse.state import State, as_words, find_ties

LARGEST = 448.0  # of E4M3
BLOCK = 128
SUFFIX = "_scale_inv"
SCALES = ("power of two", "float32")
Select = Callable[[str, Tensor], bool]


def matrices(name: str, tensor: Tensor) -> bool:
    """The default choice of what is quantised: projections of layers, as engines do; not embedding, head or norms."""
    return tensor.ndim == 2 and "proj" in name


def _blocks(weight: Tensor, block: int) -> Tensor:
    """(M, N) -> (ceil(M/b), ceil(N/b), b, b), padded with zeros, float32."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % block, 0, -rows % block))
    return padded.view(-(-rows // block), block, -(-cols // block), block).transpose(1, 2)


def block_scales(largest: Tensor, *, scales: str = "power of two") -> Tensor:
    """Scales for blocks whose largest sizes are ``largest``, so that ``size / scale`` is at most 448; float32.

    Args:
        largest: any shape, not negative.
        scales: ``"power of two"`` for the least power of two that does it, exact; ``"float32"`` for ``largest / 448``.

    All-zero blocks have scale 1. Scales never fall below 2^-126, the least normal number.

    Raises:
        ValueError: another kind of scales, or sizes that are not finite.
    """
    if scales not in SCALES:
        raise ValueError(f"scales = {scales!r} must be one of {', '.join(SCALES)}")
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weights with NaN or infinite values cannot be quantised")
    least = torch.full_like(largest, 2.0**-126)
    if scales == "float32":
        found = torch.maximum(largest / LARGEST, least)
    else:
        mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, 448 = 0.875 * 2^9
        found = torch.ldexp(torch.ones_like(largest), exponent - 9 + (mantissa > 0.875))
        found = torch.maximum(found, least)
    return torch.where(largest == 0, torch.ones_like(largest), found)


def quantise_fp8(weight: Tensor, *, block: int = BLOCK, scales: str = "power of two") -> tuple[Tensor, Tensor]:
    """Quantise a matrix to E4M3 with one scale for each block.

    Args:
        weight: (M, N), floating point; any sizes, edge blocks are smaller.
        block: rows and columns of a block.
        scales: see :func:`block_scales`.

    Returns:
        Payload (M, N) ``float8_e4m3fn`` and scales (ceil(M/block), ceil(N/block)) float32; the weight is about
        ``payload * scale``.

    Raises:
        ValueError: not a matrix, or values that are not finite.
    """
    if weight.ndim != 2:
        raise ValueError(f"a matrix is needed, not a tensor of shape {tuple(weight.shape)}")
    rows, cols = weight.shape
    cut = _blocks(weight, block)
    scale = block_scales(cut.abs().amax((2, 3)), scales=scales)
    payload = (cut / scale[..., None, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    whole = payload.view(torch.uint8).transpose(1, 2).reshape(len(scale) * block, -1)[:rows, :cols].contiguous()
    return whole.view(torch.float8_e4m3fn), scale


def dequantise_fp8(payload: Tensor, scale: Tensor, *, block: int = BLOCK) -> Tensor:
    """``payload * scale``: (M, N) ``float8_e4m3fn`` and (ceil(M/block), ceil(N/block)) -> (M, N) float32."""
    wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return payload.float() * wide[: payload.shape[0], : payload.shape[1]]


def quantise_state(
    state: State, *, select: Select = matrices, block: int = BLOCK, scales: str = "power of two"
) -> dict[str, Tensor]:
    """What a trainer publishes for FP8 receivers: selected matrices as payload and scales, all else as it is.

    Args:
        state: bfloat16 weights by name.
        select: which tensors are quantised.
        block, scales: see :func:`quantise_fp8`.

    Returns:
        Payloads under the names of their weights and scales under the names with ``_scale_inv`` behind; ties stay.

    Raises:
        StateError: a name with ``_scale_inv`` behind is there already, or a selected tensor cannot be quantised.
    """
    ties = find_ties(state)
    out: dict[str, Tensor] = {}
    for name in sorted(state):
        if name + SUFFIX in state:
            raise StateError(f"{name + SUFFIX!r} is the name of the scales of {name!r}, but is there already")
        owner = ties.get(name, name)
        if not select(name, state[name]):
            out[name] = out[owner] if owner in out and owner + SUFFIX not in out else state[name]
        elif owner != name and owner + SUFFIX in out:
            out[name], out[name + SUFFIX] = out[owner], out[owner + SUFFIX]
        else:
            try:
                out[name], out[name + SUFFIX] = quantise_fp8(state[name], block=block, scales=scales)
            except ValueError as error:
                raise StateError(f"{name!r}: {error}") from error
    return out


def changed_blocks(old: Tensor, new: Tensor, block: int = BLOCK) -> Any:
    """Which blocks have a cell whose bits differ: (ceil(M/block), ceil(N/block)) boolean array of numpy."""
    rows, cols = new.shape
    differ = (as_words(old) != as_words(new)).reshape(rows, cols)
    padded = np.pad(differ, ((0, -rows % block), (0, -cols % block)))
    return padded.reshape(-(-rows // block), block, -(-cols // block), block).any(axis=(1, 3))


class Fp8Shadow:
    """A receiver's FP8 weights beside the bfloat16 state that patches are made for.

    Args:
        state: bfloat16 weights by name, such as ``Subscriber.state``; kept, not copied.
        select, block, scales: see :func:`quantise_state`.

    ``quantised`` is what :func:`quantise_state` makes of the newest state, bit for bit; its payloads and scales are
    changed in place by :meth:`update`. The price is the shadow: two bytes for each weight.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        *,
        select: Callable[[str, Tensor], bool] = matrices,
        block: int = BLOCK,
        scales: str = "power of two",
    ) -> None:
        self.select, self.block, self.scales = select, block, scales
        self.quantised = quantise_state(state, select=select, block=block, scales=scales)
        self._state: Mapping[str, Tensor] = dict(state)

    def update(self, state: State) -> dict[str, int]:
        """Go to the next state; only blocks with a changed cell are quantised again.

        Args:
            state: same names, shapes and dtypes as before.

        Returns:
            For each quantised tensor that changed, the number of blocks that were quantised.

        Raises:
            StateError: other names, shapes or dtypes, or values that are not finite; nothing was changed.
        """
        if set(state) != set(self._state):
            raise StateError(f"names differ: {sorted(set(state) ^ set(self._state))[:5]}; make a new shadow")
        for name, new in state.items():
            old = self._state[name]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise StateError(f"{name!r} was {old.dtype} {tuple(old.shape)}, now {new.dtype} {tuple(new.shape)}")
        ties, staged, plain = find_ties(state), {}, {}
        for name, new in state.items():
            if new is self._state[name]:
                continue
            if name + SUFFIX not in self.quantised:
                plain[name] = new
            elif name not in ties:
                staged[name] = self._stage(name, self._state[name], new)
        for name, (where, payload, scale) in staged.items():
            self._write(name, where, payload, scale)
        self.quantised.update(plain)
        self._state = dict(state)
        return {name: len(where) for name, (where, _, _) in staged.items() if len(where)}

    def _stage(self, name: str, old: Tensor, new: Tensor) -> tuple[list[tuple[int, int]], list[Tensor], list[Tensor]]:
        where = [(int(i), int(j)) for i, j in np.argwhere(changed_blocks(old, new, self.block))]
        b, payloads, found = self.block, [], []
        for i, j in where:
            try:
                payload, scale = quantise_fp8(new[i * b : i * b + b, j * b : j * b + b], block=b, scales=self.scales)
            except ValueError as error:
                raise StateError(f"{name!r}: {error}") from error
            payloads.append(payload)
            found.append(scale)
        return where, payloads, found

    def _write(self, name: str, where: list[tuple[int, int]], payloads: list[Tensor], scales: list[Tensor]) -> None:
        b, whole, all_scales = self.block, self.quantised[name].view(torch.uint8), self.quantised[name + SUFFIX]
        for (i, j), payload, scale in zip(where, payloads, scales, strict=True):
            whole[i * b : i * b + b, j * b : j * b + b] = payload.view(torch.uint8)
            all_scales[i, j] = scale[0, 0]
