"""Muon: momentum, orthogonalised by Newton-Schulz, as a ``torch.optim.Optimizer``.

For a matrix W with gradient g, momentum mu, learning rate lr and decay wd (spec: Keller Jordan; Moonlight; DMuon):

    B <- mu B + g            heavy_ball     |    B <- mu B + (1 - mu) g       ema
    N  = g + mu B            nesterov       |    N  = (1 - mu) g + mu B       nesterov
    N  = B                   without
    W <- (1 - lr wd) W - lr scale(rows, cols) NewtonSchulz(N)

It updates whole matrices that this process holds. It is not sharded, and it does not average gradients between
processes: that comes before ``step``. Vectors, embeddings and the output head belong to AdamW, see
:func:`~dist_lib.optim.split_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dist_lib.ops import newton_schulz
from dist_lib.optim.conversion import BUFFER, buffer_dtype, from_torch_muon, is_torch_muon, matched_buffers
from dist_lib.optim.scales import check_options, check_parameter, per_step_coefficients, update_scale

# Matrices of one shape go through Newton-Schulz together up to this many elements (512 MiB in float32, several times
# over while it runs). A matrix's result does not depend on the others in its batch.
BATCH_ELEMENTS = 1 << 27


def gradients_finite(parameters: list[Tensor]) -> bool:
    """Whether no gradient holds NaN or infinity; one device synchronisation. Sparse gradients count by their values."""
    flags = [
        torch.isfinite(p.grad.coalesce().values() if p.grad.is_sparse else p.grad).all()
        for p in parameters
        if p.grad is not None
    ]
    return not flags or bool(torch.stack([f.to(flags[0].device) for f in flags]).all())


def next_momentum(buffer: Tensor, grad: Tensor, *, momentum: float, form: str, nesterov: bool) -> Tensor:
    """Advance ``buffer`` in place and return what is orthogonalised; ``grad`` is not changed.

    The result is ``buffer`` itself without ``nesterov``: do not write into it.
    """
    if form == "ema":
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if nesterov else buffer
    buffer.mul_(momentum).add_(grad)
    return grad.add(buffer, alpha=momentum) if nesterov else buffer


def as_matrices(tensor: Tensor, *, flatten: bool, split_sizes: tuple[int, ...] | None) -> list[Tensor]:
    """The matrices that are orthogonalised separately, as stacks (b, rows, cols) that share memory where they can.

    A matrix is a stack of one; (E, m, n) is a stack of E; ``flatten`` makes (out, ...) one matrix of ``out`` rows;
    ``split_sizes`` cuts the rows into blocks, as of a fused query-key-value projection.
    """
    matrix = tensor.flatten(1) if flatten else tensor
    stack = matrix.unsqueeze(0) if matrix.ndim == 2 else matrix
    return list(stack.split(list(split_sizes), dim=1)) if split_sizes is not None else [stack]


def apply_update(p: Tensor, update: Tensor, *, lr: float | Tensor, weight_decay: float) -> None:
    """``p <- (1 - lr wd) p - lr update`` in place; half types are computed in float32 and rounded once."""
    rate = lr.reshape(()) if isinstance(lr, Tensor) else lr
    if p.dtype in (torch.float16, torch.bfloat16):
        p.copy_(p.float() * (1 - rate * weight_decay) - rate * update)
        return
    if isinstance(rate, Tensor):
        p.mul_(1 - rate * weight_decay).sub_(update * rate)
    else:
        p.mul_(1 - rate * weight_decay).add_(update, alpha=-rate)


@dataclass
class _Block:
    """A stack of matrices to orthogonalise: block ``index`` of the ``parts`` of parameter ``p``."""

    p: Tensor
    parts: list[Tensor | None]
    index: int
    stack: Tensor


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz.

    Options may be given for each parameter group.

    Args:
        params: parameters, dicts of groups, or (name, parameter) pairs. Each (rows, cols), a stack of separate
            matrices (experts, rows, cols), or any convolution kernel with ``flatten``.
        lr: learning rate; a float or a Tensor of one element. Its meaning depends on ``scale``.
        weight_decay: decoupled, multiplied by the unscaled ``lr``.
        momentum: mu.
        nesterov: mix the new gradient in once more.
        momentum_form: ``"heavy_ball"`` (DMuon, Moonlight) or ``"ema"`` (Keller Jordan, torch); the updates are equal
            up to rounding, the buffers differ by a factor ``1 - mu``.
        scale: ``"match_rms_adamw"`` (learning rates of AdamW carry over), ``"original"`` or ``"spectral"``, see
            :func:`~dist_lib.optim.update_scale`; of each block where rows are split.
        ns_steps: Newton-Schulz steps.
        ns_coefficients: name of a coefficient set, one (a, b, c) for all steps, or one for each step.
        split_sizes: rows of the blocks that are orthogonalised separately; must sum to the rows.
        flatten: treat a tensor of more than two dimensions as the matrix (first, rest).
        maximize: ascend.
        nonfinite: with NaN or infinity in any gradient, ``"raise"`` FloatingPointError or ``"skip"`` the whole step;
            either way neither weights nor momentum have changed. ``"propagate"`` does not look, and so does not wait
            for the device.

    Raises:
        ValueError, TypeError: an option or a parameter that is not allowed, here and in ``add_param_group``.

    Attributes:
        orthogonalised: matrices that went through Newton-Schulz since this optimizer was made.
        skipped_steps: steps left out because of ``nonfinite="skip"``.
    """

    orthogonalised: int = 0
    skipped_steps: int = 0

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_form: str = "heavy_ball",
        scale: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: Any = "polar_express",
        split_sizes: tuple[int, ...] | None = None,
        flatten: bool = False,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refused groups leave the optimizer as it was.

        Raises:
            ValueError, TypeError: an option or a parameter that is not allowed.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        check_options(group, self.defaults)
        group["ns_coefficients"] = per_step_coefficients(group["ns_coefficients"], group["ns_steps"])
        if group["split_sizes"] is not None:
            group["split_sizes"] = tuple(group["split_sizes"])
        # The smallest matrix there is: Newton-Schulz itself says whether it knows the coefficients.
        newton_schulz(torch.ones(1, 1, 1), steps=group["ns_steps"], coefficients=group["ns_coefficients"])
        names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            check_parameter(p, group, name)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. Parameters without a gradient are left alone, and get no state.

        Args:
            closure: evaluates the model and returns the loss.

        Raises:
            FloatingPointError: NaN or infinity with ``nonfinite="raise"``.
            TypeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    raise TypeError(
                        f"a parameter of shape {tuple(p.shape)} has a sparse gradient; Muon needs dense ones"
                    )
        if self._may_step():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _may_step(self) -> bool:
        """Decide before anything changes, over all groups that look at their gradients."""
        looked = [g for g in self.param_groups if g["nonfinite"] != "propagate"]
        if gradients_finite([p for g in looked for p in g["params"]]):
            return True
        if any(g["nonfinite"] == "raise" and not gradients_finite(g["params"]) for g in looked):
            raise FloatingPointError(
                "a gradient holds NaN or infinity; nothing was changed. Use nonfinite='skip' to leave such steps out, "
                "or a GradScaler with float16"
            )
        self.skipped_steps += 1
        return False

    def _step_group(self, group: dict[str, Any]) -> None:
        waiting: dict[tuple[Any, ...], list[_Block]] = {}
        for p in group["params"]:
            if p.grad is None or p.numel() == 0:
                continue
            stacks = as_matrices(self._direction(p, group), flatten=group["flatten"], split_sizes=group["split_sizes"])
            parts: list[Tensor | None] = [None] * len(stacks)
            for index, stack in enumerate(stacks):
                key = (stack.shape[1:], stack.dtype, stack.device)
                waiting.setdefault(key, []).append(_Block(p, parts, index, stack))
        for blocks in waiting.values():
            for batch in _batches(blocks):
                self._update(batch, group)

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state, dtype = self.state[p], buffer_dtype(p)
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        grad = p.grad.to(dtype)  # type: ignore[union-attr]
        return next_momentum(
            state[BUFFER],
            grad.neg() if group["maximize"] else grad,
            momentum=group["momentum"],
            form=group["momentum_form"],
            nesterov=group["nesterov"],
        )

    def _update(self, batch: list[_Block], group: dict[str, Any]) -> None:
        stacked = torch.cat([block.stack for block in batch])  # a copy: the momentum is never handed out
        result = newton_schulz(stacked, steps=group["ns_steps"], coefficients=group["ns_coefficients"])
        self.orthogonalised += len(stacked)
        result = result * update_scale(group["scale"], stacked.shape[1], stacked.shape[2])
        for block, update in zip(batch, result.split([len(b.stack) for b in batch]), strict=True):
            block.parts[block.index] = update
            done = [part for part in block.parts if part is not None]
            if len(done) == len(block.parts):
                whole = done[0] if len(done) == 1 else torch.cat(done, dim=1)
                whole = whole.reshape(block.p.shape)
                apply_update(block.p, whole, lr=group["lr"], weight_decay=group["weight_decay"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load state of this class or of ``torch.optim.Muon``; options come from the state as with torch's optimizers.

        Raises:
            ValueError: other numbers of parameters, other shapes, or options that are not allowed.
        """
        pairs = matched_buffers(state_dict, self.param_groups)
        if is_torch_muon(state_dict):
            state_dict = from_torch_muon(state_dict, self.param_groups)
            pairs = matched_buffers(state_dict, self.param_groups)
        for group in state_dict["param_groups"]:
            check_options({**self.defaults, **group}, self.defaults)
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for p, buffer in pairs:
            self.state[p][BUFFER] = buffer.detach().to(device=p.device, dtype=buffer_dtype(p), copy=True)


def _batches(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Cut a list of equal shapes into batches of at most BATCH_ELEMENTS (one block at least)."""
    batch: list[_Block] = []
    filled = 0
    for block in blocks:
        if batch and filled + block.stack.numel() > BATCH_ELEMENTS:
            yield batch
            batch, filled = [], 0
        batch.append(block)
        filled += block.stack.numel()
    if batch:
        yield batch
