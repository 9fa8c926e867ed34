"""The five ways to train that the lab compares, behind one interface: a backward, a step, counts and weights.

Owners (:class:`~dist_lib.dmuon.optimizer.DMuon`) beside what else can be done with the same gradients, and the single
process that all of them must equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_lib.comm import CommCounter, ExactReducer
from dist_lib.dmuon.baselines import BASELINES, Baseline
from dist_lib.dmuon.bytes import Mode, Sizes, rest_payload, step_payload
from dist_lib.dmuon.checkpoint import model_state_dict
from dist_lib.dmuon.config import RuntimeConfig, numbered_layer, whole_model
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.dmuon.fsdp import DMuonFSDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.dmuon.plan import OwnerPlan, make_plan
from dist_lib.models import Decoder, get_config
from dist_lib.optim import MuonWithAdamW, split_parameters
from dist_lib.tasks import BatchSampler
from labs.dmuon.config import Config

BASELINE_MODES: Mapping[str, Mode] = {"replicated": "replicated", "gather": "gather-keep", "all-to-all": "all-to-all"}


@dataclass
class Method:
    """One way to train one model on all ranks.

    Attributes:
        name: one of :data:`~labs.dmuon.config.NAMES`.
        model: this rank's.
        plan: owners; also of the methods that have none, for the byte formulas.
        optimizer: what makes the step.
        runtime: of the owners, else None.
        base_lr: peak learning rate.
    """

    name: str
    model: Decoder
    plan: OwnerPlan
    optimizer: DMuon | Baseline
    runtime: DMuonDDP | DMuonFSDP | None
    base_lr: float

    def set_lr(self, factor: float) -> None:
        """Learning rate of the next step, as a share of the peak."""
        if isinstance(self.optimizer, Baseline):
            self.optimizer.set_lr(factor * self.base_lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = factor * self.base_lr

    def payload(self, counter: CommCounter) -> int:
        """Counted bytes that :meth:`formula` speaks of."""
        if isinstance(self.runtime, DMuonFSDP):  # FSDP2 moves the other parameters with operations of its own
            return counter.bytes("reduce") + counter.bytes("broadcast")
        return counter.bytes()

    def formula(self, rank: int, mode: str, shards: int | None = None) -> int:
        """Bytes of one step after the first, by the formulas: matrices, other parameters, and the ranks' flags.

        ``shards`` is the number of ranks of a replica, for the two HSDP modes.
        """
        split = split_parameters(self.model)
        world, every = self.plan.world_size, len(split.muon) + len(split.adamw)
        others = [p.numel() for _, p in split.adamw]
        if self.runtime is not None:
            sizes = Sizes(shards=shards if mode.startswith("hsdp") else None)
            matrices = sum(step_payload(mode, self.plan, sizes)[rank].values())  # type: ignore[arg-type]
            if isinstance(self.runtime, DMuonFSDP):
                return matrices
            return matrices + sum(rest_payload(others, world).values()) + self.runtime.reduction.control_bytes + 8
        if self.name == "adamw":
            others, matrices = others + [p.numel() for _, p in split.muon], 0
        else:
            sizes = Sizes(unshards=1)  # the weights are whole on every rank: they travel once
            matrices = sum(step_payload(BASELINE_MODES[self.name], self.plan, sizes)[rank].values())
        return matrices + sum(rest_payload(others, world).values()) + 4 * every

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name. Collective."""
        if self.runtime is not None:
            return model_state_dict(self.runtime)
        return {n: t.detach().cpu().clone() for n, t in self.model.state_dict().items()}

    def momentum_bytes(self) -> int:
        """Bytes of momentum that this rank holds for owned matrices; 0 for methods without owners."""
        muon = self.optimizer.muon if isinstance(self.optimizer, DMuon) else None
        if muon is None:
            return 0
        tensors = [t for state in muon.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in tensors if t.ndim)


def owner_plan(model: Decoder, config: Config, world: int) -> OwnerPlan:
    """Owners of a model's matrices."""
    return make_plan(split_parameters(model).muon, world, method=config.owners)  # type: ignore[arg-type]


def device_mesh(config: Config, world: int, device: torch.device) -> DeviceMesh:
    """Mesh of an FSDP mode: all ranks share one set of weights, or groups of ``shards`` ranks share one each.

    Raises:
        ValueError: ``shards`` does not divide the ranks.
    """
    if not config.mode.startswith("hsdp"):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % config.shards:
        raise ValueError(f"mode {config.mode!r}: shards = {config.shards} must divide the {world} ranks")
    mesh_shape = (world // config.shards, config.shards)
    return init_device_mesh(device.type, mesh_shape, mesh_dim_names=("replicate", "shard"))


def build(name: str, config: Config, *, seed: int, world: int, device: torch.device) -> Method:
    """Make a model and one of the methods on it. Collective.

    Raises:
        KeyError: an unknown name.
    """
    model = Decoder(get_config(config.model), seed=seed).to(device)
    plan = owner_plan(model, config, world)
    reducer = ExactReducer(ordered=config.ordered)
    options: dict[str, Any] = {"weight_decay": config.weight_decay}
    if name != "dmuon":
        lr = config.adamw_lr if name == "adamw" else config.lr
        return Method(name, model, plan, BASELINES[name](model, lr, reducer=reducer, **options), None, lr)
    runtime: DMuonDDP | DMuonFSDP
    settings = RuntimeConfig(publish=config.publish)  # type: ignore[arg-type]
    if config.mode == "ddp":
        layer_of = whole_model if config.packs == "model" else numbered_layer
        runtime = DMuonDDP(model, plan, config=settings, reducer=reducer, layer_of=layer_of)
    else:
        freed, mesh = config.mode.endswith("free"), device_mesh(config, world, device)
        runtime = DMuonFSDP(model, plan, mesh=mesh, reshard_after_forward=freed, config=settings, reducer=reducer)
    return Method(name, model, plan, DMuon(runtime, config.lr, **options), runtime, config.lr)


def digests(weights: Mapping[str, Tensor]) -> list[str]:
    """One hash of the bits of each tensor, names in order."""
    return [hashlib.sha256(weights[n].detach().contiguous().numpy().tobytes()).hexdigest() for n in sorted(weights)]


class Twin:
    """A single process that does what all ranks together should: gradients of each rank's part, added in rank order.

    Args:
        config: of the lab.
        seed: of the weights.
        world: ranks that it stands for.
        device: where it computes.
    """

    def __init__(self, config: Config, *, seed: int, world: int, device: torch.device) -> None:
        self.model = Decoder(get_config(config.model), seed=seed).to(device)
        self.world, self.base_lr = world, config.lr
        split = split_parameters(self.model)
        self.optimizer = MuonWithAdamW(split, lr=config.lr, weight_decay=config.weight_decay)

    def step(self, sampler: BatchSampler, number: int, factor: float) -> None:
        """One step on the global batch ``number``."""
        parameters: list[nn.Parameter] = list(self.model.parameters())
        total: list[Tensor] = []
        for rank in range(self.world):
            tokens, targets = (t.to(parameters[0].device) for t in sampler.shard(number, rank, self.world))
            found = torch.autograd.grad(self.model.loss(tokens, targets), parameters)
            total = [a + b for a, b in zip(total, found, strict=True)] if total else list(found)
        for p, gradient in zip(parameters, total, strict=True):
            p.grad = gradient / self.world
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.base_lr
        self.optimizer.step()
