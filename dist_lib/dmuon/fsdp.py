"""Fully sharded: a matrix has storage on its owner alone, and for a moment on every rank whose layer is at work.

FSDP2 shards everything else; it is told to ignore the matrices (``ignored_params``). Before a layer runs, its owners
broadcast its matrices; after its forward they are freed, to be broadcast again for backward, or kept until its
gradients have gone to the owners. That broadcast *is* the publication of the last step: none follows the step itself.

On a two-dimensional mesh (replicas, shards), the owner's column, one rank in every replica, holds the matrix. Gradients
are summed within each replica onto the column and then along the column onto the owner; after the step the owner
broadcasts along its column, and each replica broadcasts within itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Parameter

from dist_lib.comm import Reducer, agree
from dist_lib.dmuon.config import LayerOf, RuntimeConfig, numbered_layer
from dist_lib.dmuon.packing import LayerGroup, Pack
from dist_lib.dmuon.plan import OwnerPlan
from dist_lib.dmuon.publish import Publication
from dist_lib.dmuon.rest import Rest, WholeRest
from dist_lib.dmuon.runtime import Runtime
from dist_lib.optim import ParameterSplit


class DMuonFSDP(Runtime):
    """Owner-sharded Muon over a model whose other parameters FSDP2 shards.

    All ranks must run the same layers in the same order, as FSDP2 itself demands; a layer or parameter that *no* rank
    uses is fine. Weights have values only inside forward, backward and :meth:`whole`. Evaluation and activation
    checkpointing work as usual.

    Args:
        model: the plain module; ``fully_shard`` is called here, on its layers and on itself.
        plan: owners, numbered along the flattened mesh.
        mesh: of one dimension, or of two, (replicas, shards); must hold all ranks in order. Default: one dimension.
        reshard_after_forward: free weights after forward and fetch them again for backward.
        mp_policy: FSDP2's precision of the parameters that are no matrices.
        split, config, reducer, layer_of: see :class:`~dist_lib.dmuon.runtime.Runtime`. With one dimension
            ``config.publish`` changes nothing; with two it says when the broadcast along the column is waited for.

    Raises:
        ValueError: a mesh of another kind, or a precision for a parameter that is no matrix.
    """

    mode = "fsdp"

    def __init__(
        self,
        model: nn.Module,
        plan: OwnerPlan | None = None,
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        split: ParameterSplit | None = None,
        config: RuntimeConfig | None = None,
        reducer: Reducer | None = None,
        layer_of: LayerOf = numbered_layer,
    ) -> None:
        world = torch.distributed.get_world_size()
        device = next(model.parameters()).device.type
        self.mesh = init_device_mesh(device if device == "cuda" else "cpu", (world,)) if mesh is None else mesh
        ranks = self.mesh.mesh.flatten().tolist()
        if self.mesh.ndim not in (1, 2) or ranks != list(range(world)):
            raise ValueError(
                f"a mesh of {self.mesh.ndim} dimensions over ranks {ranks}; need one or two dimensions over all "
                f"{world} ranks in order"
            )
        if self.mesh.ndim == 2 and not self.mesh.mesh_dim_names:
            raise ValueError("the mesh has no names: init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))")
        self.reshard, self._policy = reshard_after_forward, mp_policy or MixedPrecisionPolicy()
        self.replicas = self.mesh.size(0) if self.mesh.ndim == 2 else 1
        self.shards = world // self.replicas
        self._shard_group = self.mesh.get_group(self.mesh.ndim - 1)
        self._column_group = self.mesh.get_group(0) if self.mesh.ndim == 2 else None
        self._flying: dict[str, list[Publication]] = {}
        self._column: dict[str, list[Publication]] = {}
        self._present: set[str] = set()
        self._in_backward: set[str] = set()
        self._order: list[str] = []
        self._agreed_order, self._forward_at, self._backward_at = False, -1, 0
        super().__init__(model, plan, split=split, config=config, reducer=reducer, layer_of=layer_of)
        self._by_layer = {g.layer: g for g in self.groups}
        self._handles.append(model.register_forward_pre_hook(lambda *_: self._forward_begins(), prepend=True))
        for group in self.groups:
            self._free(group)

    def _check_config(self, rest: dict[str, Parameter]) -> None:
        rounded = [n for n, p in rest.items() if self.config.param_dtype(n, p.dtype) != p.dtype]
        rounded += [n for n, p in rest.items() if self.config.reduce_dtype(n, p.dtype) != p.dtype]
        if rounded:
            raise ValueError(f"config.precision matches {rounded[0]}, which FSDP2 shards: use mp_policy for it")

    def _make_rest(self, rest: dict[str, Parameter]) -> Rest:
        for p in self.matrices.values():  # a storage of its own, which can be freed without harm to a neighbour
            p.data = p.detach().clone(memory_format=torch.contiguous_format)
        ignored, modules = set(self.matrices.values()), dict(self.model.named_modules())
        layers = sorted({g.layer for g in self.groups} - {""}, key=lambda n: (-n.count("."), n))
        for module in (*(modules[layer] for layer in layers), self.model):
            if module is self.model or any(p not in ignored for p in module.parameters()):
                fully_shard(
                    module,
                    mesh=self.mesh,
                    reshard_after_forward=self.reshard,
                    mp_policy=self._policy,
                    ignored_params=ignored,
                )
        now = dict(self.model.named_parameters())
        return WholeRest({n: now[n] for n in rest}, replicas=self.replicas)

    @property
    def _row(self) -> int:
        return self.rank // self.shards

    def _in_column(self, pack: Pack) -> bool:
        return self.rank % self.shards == pack.owner % self.shards

    def _transport(self, pack: Pack, flat: Tensor) -> Tensor | None:
        at = self.ranks[self._row * self.shards + pack.owner % self.shards]
        total = self.reducer.reduce_to_owner(flat, at, average=False, group=self._shard_group)
        if not self._in_column(pack):
            return None
        if self._column_group is not None:
            owner = self.ranks[pack.owner]
            total = self.reducer.reduce_to_owner(total, owner, average=False, group=self._column_group)
        return total.div_(self.world_size) if pack.owner == self.rank else None

    def _resident(self, pack: Pack, name: str) -> bool:
        """Whether this rank's parameter keeps its storage: in the owner's column, unless there is a master instead."""
        return self._in_column(pack) and self.masters.get(name, self.matrices[name]) is self.matrices[name]

    def _launch(self, group: LayerGroup) -> None:
        """Start the broadcasts that bring a layer here, unless it is here or on its way."""
        if group.layer in self._present or group.layer in self._flying:
            return
        self._flying[group.layer] = [
            Publication(
                pack,
                {n: self.masters.get(n, self.matrices[n]) for n in pack.names} if self._in_column(pack) else None,
                src=self.ranks[self._row * self.shards + pack.owner % self.shards],
                group=self._shard_group,
                device=self.device,
                start=self.log.mark(),
            )
            for pack in group.packs
        ]

    @torch.no_grad()
    def _fill(self, group: LayerGroup, flying: list[Publication]) -> None:
        for publication in flying:
            pack, start = publication.pack, self.log.mark()
            parameters = [self.matrices[n] for n in pack.names]
            views = publication.wait([p.shape for p in parameters])
            for name, p, view in zip(pack.names, parameters, views, strict=True):
                if not self._resident(pack, name):
                    storage = p.untyped_storage()
                    if storage.nbytes() == 0:
                        storage.resize_(p.numel() * p.element_size())
                    with torch.autograd._unsafe_preserve_version_counter(p):  # type: ignore[attr-defined]
                        p.copy_(view)
            self.log.add("materialise", group.layer, pack.publish_bytes, publication.start)
            self.log.add("wait", group.layer, 0, start)

    def _arrive(self, group: LayerGroup) -> None:
        self._wait_column(group)
        self._launch(group)
        if group.layer in self._flying:
            self._fill(group, self._flying.pop(group.layer))
            self._present.add(group.layer)

    def _free(self, group: LayerGroup) -> None:
        self._present.discard(group.layer)
        for pack in group.packs:
            for name in pack.names:
                if not self._resident(pack, name):
                    self.matrices[name].untyped_storage().resize_(0)

    def _forward_begins(self) -> None:
        self._forward_at, self._backward_at = -1, len(self._order)
        if not self._agreed_order:
            self._order = []

    def _before_forward(self, group: LayerGroup) -> None:
        self._arrive(group)
        if self._in_backward:  # recomputation
            return
        self._forward_at += 1
        if not self._agreed_order:
            self._order.append(group.layer)
        else:
            self._forward_at = self._prefetch(group, self._forward_at, +1)

    def _prefetch(self, group: LayerGroup, at: int, step: int) -> int:
        """Start fetching the neighbour in the recorded order; what all ranks know alike decides, never a time.

        Returns ``at``, or a place outside of the order if this pass runs otherwise: then nothing is fetched ahead.
        """
        order = self._order
        if not 0 <= at < len(order) or order[at] != group.layer:
            return len(order) if step > 0 else -1
        if 0 <= at + step < len(order):
            neighbour = self._by_layer[order[at + step]]
            self._wait_column(neighbour)
            self._launch(neighbour)
        return at

    def _after_forward(self, group: LayerGroup) -> None:
        if group.layer in self._in_backward:  # recomputation: backward is about to read the weights
            return
        if self.reshard or group.layer not in self._missing:
            self._free(group)

    def _before_backward(self, group: LayerGroup) -> None:
        if not self._in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self._in_backward.add(group.layer)
        self._arrive(group)
        if self.reshard and self._agreed_order:
            self._backward_at = self._prefetch(group, self._backward_at - 1, -1)

    def _after_backward(self, group: LayerGroup) -> None:
        self._in_backward.discard(group.layer)
        self._free(group)

    def _backward_ends(self) -> None:
        for layer in sorted(self._in_backward):  # those with a parameter that this backward did not reach
            self._missing.pop(layer, None)
            self._free(self._by_layer[layer])
        self._in_backward.clear()

    def _before_state_dict(self) -> None:
        if not all(layer in self._present for layer in self._by_layer):
            raise RuntimeError(
                "outside of their layers' work most matrices have no storage: use dist_lib.dmuon.model_state_dict, "
                "or read weights inside runtime.whole()"
            )

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, backward adds gradients up on each rank, whole, and sends none."""
        return self._paused()

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            with self.reduction.paused():
                yield
        finally:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]

    def finish_backward(self) -> None:
        """Bring all gradients to their owners and free all weights. Collective."""
        if not self._agreed_order and self._order:
            agree(self._order, what="the order in which layers run", group=self.group)
            self._agreed_order = True
        super().finish_backward()
        self._free_all()

    @torch.no_grad()
    def publish(self) -> None:
        """On a two-dimensional mesh: broadcast along the owners' columns. Collective."""
        self._free_all()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # weights that an evaluation left whole are those before the step
                module.reshard()
        if self._column_group is None:
            return
        for group in self.groups:
            self._column[group.layer] = [
                Publication(
                    pack,
                    self.masters if pack.owner == self.rank else None,
                    src=self.ranks[pack.owner],
                    group=self._column_group,
                    device=self.device,
                    start=self.log.mark(),
                )
                for pack in group.packs
                if self._in_column(pack)
            ]
            if self.config.publish == "sync":
                self._wait_column(group)

    @torch.no_grad()
    def _wait_column(self, group: LayerGroup) -> None:
        for publication in self._column.pop(group.layer, ()):
            pack, start = publication.pack, self.log.mark()
            parameters = [self.matrices[n] for n in pack.names]
            views = publication.wait([p.shape for p in parameters])
            if pack.owner != self.rank:
                for p, view in zip(parameters, views, strict=True):
                    p.copy_(view)
            self.log.add("publish", group.layer, pack.publish_bytes, publication.start)
            self.log.add("wait", group.layer, 0, start)

    def drain(self) -> None:
        """Wait for everything on its way, and free what has arrived."""
        for group in self.groups:
            self._wait_column(group)
        self._free_all()

    def _free_all(self) -> None:
        for layer, flying in list(self._flying.items()):
            self._fill(self._by_layer[layer], flying)
            del self._flying[layer]
        self._in_backward.clear()
        self._missing.clear()
        for group in self.groups:
            self._free(group)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block all matrices have values on all ranks, to be read. Collective."""
        for group in self.groups:
            self._arrive(group)
        try:
            yield
        finally:
            self._free_all()
