"""Data parallel: every rank holds all weights; each matrix is updated by its owner and published after the step.

The gradient of a matrix is reduced to its owner alone, and its new value is broadcast from there, at once or layer by
layer just before the next forward needs it. All other parameters are cut evenly over the ranks
(:class:`~dist_lib.dmuon.rest.ShardedRest`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from dist_lib.dmuon.packing import LayerGroup, Pack
from dist_lib.dmuon.publish import Publication
from dist_lib.dmuon.rest import Rest, ShardedRest
from dist_lib.dmuon.runtime import Runtime


class DMuonDDP(Runtime):
    """Owner-sharded Muon over replicated weights.

    Handles parameters that some or all ranks do not use, modules used several times, tied weights, owners without a
    matrix, accumulation (:meth:`no_sync`) and mixed precision per parameter. Weights that belong to no layer are
    always published at once. A layer with a parameter that a backward does not reach, and all layers before it in the
    model, are reduced at the end of backward instead of during it. Buffers, such as running means, are set equal once,
    at the start, and are each rank's own afterwards.

    For arguments and errors see :class:`~dist_lib.dmuon.runtime.Runtime`; ``group`` is the data-parallel group.
    """

    mode = "ddp"

    def _check_config(self, rest: dict[str, Parameter]) -> None:
        pass

    def _make_rest(self, rest: dict[str, Parameter]) -> Rest:
        self._pending: dict[str, list[Publication]] = {}
        return ShardedRest(
            rest,
            self.config,
            self.reducer,
            self.log,
            rank=self.rank,
            world_size=self.world_size,
            group=self.group,
        )

    def _transport(self, pack: Pack, flat: Tensor) -> Tensor | None:
        reduced = self.reducer.reduce_to_owner(flat, self.ranks[pack.owner], group=self.group)
        return reduced if pack.owner == self.rank else None

    @torch.no_grad()
    def publish(self) -> None:
        """Broadcast the owners' weights, layers in the model's order; and the other parameters. Collective.

        Raises:
            RuntimeError: the last publication has not been waited for.
        """
        if self._pending:
            raise RuntimeError(f"layers {sorted(self._pending)} still wait for the last publication: call drain()")
        self.rest.publish()
        for group in self.groups:
            self._pending[group.layer] = [self._send(pack) for pack in group.packs]
        if self.config.publish == "sync":
            self.drain()
        else:
            self._wait("")

    def _send(self, pack: Pack) -> Publication:
        mine = pack.owner == self.rank
        return Publication(
            pack,
            self.masters if mine else None,
            src=self.ranks[pack.owner],
            group=self.group,
            device=self.device,
            start=self.log.mark(),
        )

    @torch.no_grad()
    def _wait(self, layer: str) -> None:
        for publication in self._pending.pop(layer, ()):
            pack, start = publication.pack, self.log.mark()
            parameters = [self.matrices[n] for n in pack.names]
            views = publication.wait([p.shape for p in parameters])
            if pack.owner != self.rank:
                for p, view in zip(parameters, views, strict=True):
                    p.copy_(view)
            self.log.add("publish", layer, pack.publish_bytes, publication.start)
            self.log.add("wait", layer, 0, start)

    def drain(self) -> None:
        """Wait for everything on its way; afterwards every rank holds all new weights."""
        for layer in list(self._pending):
            self._wait(layer)

    def _before_forward(self, group: LayerGroup) -> None:
        if group.layer in self._pending:
            self._wait(group.layer)

    def _after_forward(self, group: LayerGroup) -> None:
        pass

    def _before_backward(self, group: LayerGroup) -> None:
        pass

    def _after_backward(self, group: LayerGroup) -> None:
        pass

    def _before_state_dict(self) -> None:
        self.drain()
