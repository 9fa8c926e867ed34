"""A model, its gradients and its optimizer, with any of the three pieces switched on; one interface for all methods.

The pieces: A, activations encoded for backward; G, gradients held and sent in 8 bits; O, AdamW's moments in 8 bits
(:func:`~dist_lib.agoq.adamw_8bit`). Weights are replicated, or sharded by FSDP2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from dist_lib.agoq import QuantizedGradients, adamw_8bit, quantize_activations, quantize_fsdp_gradients
from dist_lib.agoq.gradients import clip_factor
from dist_lib.comm import ExactReducer, collectives
from dist_lib.models import Decoder, get_config
from labs.agoq.config import PIECES, Config
from labs.framework import LabError

BETAS = (0.9, 0.95)
CHUNK = 2**25  # numbers in one float32 sum over ranks


class MainGradients(Protocol):
    """What the micro-batches of a step add up to, summed over ranks afterwards."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def all_reduce(self) -> None:
        """Average over ranks. Collective."""
        ...

    def clip_(self, max_norm: float) -> float:
        """Scale to ``max_norm`` if the norm is larger; return the norm."""
        ...

    def items(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, gradient as this rank's optimizer sees it)."""
        ...

    def reset(self) -> None:
        """Back to zero."""
        ...


class ExactGradients:
    """Main gradients in float32: backward adds to them, as to :class:`~dist_lib.agoq.QuantizedGradients`.

    Args:
        parameters: of the model, on one device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        sizes = [p.numel() for p in self._parameters.values()]
        first = next(iter(self._parameters.values()))
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=first.device)
        views = self._flat.split(sizes)
        self._views = {n: v.view_as(p) for (n, p), v in zip(self._parameters.items(), views, strict=True)}
        for name, parameter in self._parameters.items():
            self._take(name, parameter)

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        def take(p: Tensor) -> None:
            if p.grad is not None:
                self._views[name] += p.grad
                p.grad = None

        parameter.register_post_accumulate_grad_hook(take)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._flat.nbytes

    def all_reduce(self) -> None:
        """Average over ranks, some tens of millions of numbers at a time. Collective."""
        if dist.get_world_size() > 1:
            for part in self._flat.split(CHUNK):
                ExactReducer().all_reduce(part)

    def clip_(self, max_norm: float) -> float:
        """Scale to ``max_norm`` if the norm is larger; return the norm."""
        norm = float(self._flat.double().norm())
        self._flat.mul_(clip_factor(norm, max_norm))
        return norm

    def items(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, float32 gradient)."""
        return ((n, p, self._views[n]) for n, p in self._parameters.items())

    def reset(self) -> None:
        """Back to zero."""
        self._flat.zero_()


class ShardedGradients:
    """Main gradients as FSDP2 leaves them: float32 shards in ``p.grad``, reduced in every micro-batch.

    Args:
        parameters: DTensors.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        return sum(local(p.grad).nbytes for p in self._parameters.values() if p.grad is not None)

    def all_reduce(self) -> None:
        """Nothing: the shards hold the sum over ranks already."""

    def clip_(self, max_norm: float) -> float:
        """Scale to ``max_norm`` if the norm is larger; return the norm. Collective."""
        shards = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        squares = torch.stack([s.double().square().sum() for s in shards]).sum()
        norm = float(collectives.ordered_sum(squares).sqrt())
        for shard in shards:
            shard.mul_(clip_factor(norm, max_norm))
        return norm

    def items(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, this rank's shard of the gradient)."""
        return ((n, p, local(p.grad)) for n, p in self._parameters.items() if p.grad is not None)

    def reset(self) -> None:
        """Back to none."""
        for p in self._parameters.values():
            p.grad = None


def local(tensor: Tensor | None) -> Tensor:
    """What this rank holds of a tensor, sharing its storage."""
    if tensor is None:
        raise ValueError("there is no tensor: has backward run?")
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()


def make_optimizer(masters: list[nn.Parameter], config: Config, *, eight_bits: bool) -> Optimizer:
    """AdamW, or bitsandbytes' AdamW with moments in 8 bits.

    Raises:
        LabError: bitsandbytes is missing.
    """
    if not eight_bits:
        return AdamW(masters, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay)
    try:
        return adamw_8bit(masters, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay)
    except ImportError as error:
        raise LabError(f"methods 'optimizer' and 'all': {error}; or leave them out of compared") from error


@dataclass
class Method:
    """One way to train.

    Attributes:
        name: one of :data:`~labs.agoq.config.PIECES`.
        model: this rank's; sharded under FSDP2.
        gradients: of a step.
        masters: what the optimizer updates, by parameter: the parameter itself (or its shard) or a float32 copy.
        optimizer: of ``masters``.
    """

    name: str
    model: Decoder
    gradients: MainGradients
    masters: dict[str, nn.Parameter]
    optimizer: Optimizer

    def has(self, piece: str) -> bool:
        """Whether piece ``A``, ``G`` or ``O`` is on."""
        return piece in PIECES[self.name]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights with the gradients, and forget those."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, _, gradient in self.gradients.items():
            self.masters[name].grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            held = local(parameter)
            if held.data_ptr() != self.masters[name].data_ptr():
                held.copy_(self.masters[name])
        self.gradients.reset()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on."""
        return {
            "weights": {n: local(p).cpu().clone() for n, p in self.model.named_parameters()},
            "masters": {n: p.detach().cpu().clone() for n, p in self.masters.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.load_weights(state["weights"])
        for name, saved in state["masters"].items():
            self.masters[name].copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights (this rank's shards of them), in the optimizer's copy too."""
        for name, parameter in self.model.named_parameters():
            local(parameter).copy_(weights[name])
            self.masters[name].copy_(weights[name])

    def digest(self) -> str:
        """SHA-256 of this rank's weights."""
        whole = hashlib.sha256()
        for _, p in self.model.named_parameters():
            whole.update(local(p).contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return whole.hexdigest()


def build(name: str, config: Config, *, seed: int, device: torch.device) -> Method:
    """Make a model and one of the methods on it. Collective.

    Raises:
        KeyError: an unknown name.
        LabError: bitsandbytes is missing.
    """
    pieces = PIECES[name]
    model = Decoder(get_config(config.model), seed=seed)
    if config.parallel == "fsdp":
        return _sharded(name, model, config, device)
    model = model.to(device=device, dtype=config.torch_dtype)
    if "A" in pieces:
        quantize_activations(model, config.plan())
    parameters = dict(model.named_parameters())
    gradients: MainGradients
    if "G" in pieces:
        eight = QuantizedGradients(parameters.items(), config.reducer(), bucket_elements=2**62)
        eight.attach()
        gradients = eight
    else:
        gradients = ExactGradients(parameters)
    masters = {n: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for n, p in parameters.items()}
    optimizer = make_optimizer(list(masters.values()), config, eight_bits="O" in pieces)
    return Method(name, model, gradients, masters, optimizer)


def _sharded(name: str, model: Decoder, config: Config, device: torch.device) -> Method:
    pieces = PIECES[name]
    if "A" in pieces:
        quantize_activations(model, config.plan())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=config.torch_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if "G" in pieces:
        quantize_fsdp_gradients(model, config.reducer())
    parameters = dict(model.named_parameters())
    masters = {n: nn.Parameter(local(p)) for n, p in parameters.items()}
    filled = [m for m in masters.values() if m.numel()]  # a small tensor has no rows on some ranks
    optimizer = make_optimizer(filled, config, eight_bits="O" in pieces)
    return Method(name, model, ShardedGradients(parameters), masters, optimizer)


def sharded_modules(model: nn.Module) -> list[list[torch.Size]]:
    """Shapes of the parameters of each module that is sharded by itself."""
    inside: list[list[torch.Size]] = []
    taken: set[int] = set()
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in reversed(modules):  # inner ones first
        own = [p for p in module.parameters() if id(p) not in taken]  # type: ignore[attr-defined]
        taken |= {id(p) for p in own}
        inside.append([p.shape for p in own])
    return inside
