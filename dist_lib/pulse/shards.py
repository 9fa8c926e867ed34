"""States that no rank holds whole: each rank codes and stores its own rows, and one manifest makes them a version.

Made for FSDP2, whose parameters are ``DTensor`` objects cut along their first dimension. Rows 8 to 15 of ``w`` travel
as a tensor of their own, named ``w[8:16]``; receivers put the pieces together (:func:`assemble_rows`), or take the part
of one rank only (``Subscriber(part=...)``, :func:`own_rows`). Payloads are written by all ranks at once, manifest and
marker by the first one, after all have said that theirs is stored: whoever dies in between leaves the version before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dist_lib.comm import agree
from dist_lib.pulse.errors import CorruptPatchError, PulseError, StateError
from dist_lib.pulse.manifest import Part, fetch
from dist_lib.pulse.patch import diff, encode
from dist_lib.pulse.publisher import Published, Publisher, markers, refuse_nonfinite, snapshot
from dist_lib.pulse.state import State, StateDigest
from dist_lib.pulse.store import MissingObjectError
from dist_lib.pulse.subscriber import Subscriber, Update, newest_version

_ROWS = re.compile(r"(.*)\[(\d{1,18}):(\d{1,18})\]", re.DOTALL)
R = TypeVar("R")


class ShardError(PulseError):
    """Another rank failed, so that no rank went on; the message names the ranks and what they said."""


def _own_range(name: str, tensor: Any) -> tuple[int, int] | None:
    """First row and end of what this rank has of a sharded tensor; None if another rank sends it."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    cut = [d for d, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    known = all(p == Shard(0) or isinstance(p, Replicate) for p in tensor.placements)
    if not known or len(cut) > 1 or where is None:
        raise StateError(
            f"{name!r} is placed as {tensor.placements}: only one cut, along dimension 0, can be published"
        )
    if any(where[d] for d in range(mesh.ndim) if d not in cut):
        return None  # the same rows as a rank before
    rows = tensor.shape[0] if tensor.ndim else 1
    if not cut:
        return 0, rows
    piece = -(-rows // mesh.size(cut[0]))
    start = min(where[cut[0]] * piece, rows)
    return start, min(start + piece, rows)


def local_rows(state: State, *, rank: int) -> dict[str, Tensor]:
    """What one rank publishes of a state: rows of cut tensors, named after them; the first rank whole ones too.

    Args:
        state: ``DTensor`` objects that are cut along dimension 0, replicated ones, and plain tensors that are alike on
            all ranks.
        rank: in the group that publishes.

    Returns:
        Names to local tensors, which share memory with the state; none for ranks without rows.

    Raises:
        StateError: cut in another way, or a name that ends as ``[0:8]`` does.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _ROWS.fullmatch(name):
            raise StateError(f"{name!r} ends like the name of rows; rename the tensor")
        if not hasattr(tensor, "device_mesh"):
            if rank == 0:
                found[name] = tensor
            continue
        own = _own_range(name, tensor)
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        if own is None:
            continue
        start, end = own
        if tensor.ndim and local.shape[0] != end - start:
            raise StateError(f"{name!r}: rows {start} to {end} expected here, but there are {local.shape[0]}")
        if local.shape == tensor.shape and start == 0:
            found[name] = local
        elif end > start:
            found[f"{name}[{start}:{end}]"] = local
    return found


def assemble_rows(state: State) -> dict[str, Tensor]:
    """Whole tensors of what :func:`local_rows` of all ranks named; whole ones are passed on.

    Tied tensors stay tied. A tensor in one piece is not copied.

    Raises:
        CorruptPatchError: rows are missing, overlap, or differ in dtype or shape.
    """
    pieces: dict[str, list[tuple[int, int, Tensor]]] = {}
    for name, tensor in state.items():
        match = _ROWS.fullmatch(name)
        if match is None:
            pieces.setdefault(name, []).append((0, -1, tensor))
        else:
            pieces.setdefault(match[1], []).append((int(match[2]), int(match[3]), tensor))
    joined: dict[tuple[int, ...], Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[:2])
        at = 0
        for start, end, tensor in found if found[0][1] >= 0 or len(found) > 1 else []:
            fits = end > start == at and tensor.ndim and tensor.shape[0] == end - start
            if not fits or (tensor.dtype, tensor.shape[1:]) != (found[0][2].dtype, found[0][2].shape[1:]):
                raise CorruptPatchError(f"rows of {name!r} do not make a tensor: {[piece[:2] for piece in found]}")
            at = end
        key = tuple(id(tensor) for *_, tensor in found)
        if key not in joined:
            joined[key] = found[0][2] if len(found) == 1 else torch.cat([tensor for *_, tensor in found])
        result[name] = joined[key]
    return result


def own_rows(state: State) -> dict[str, Tensor]:
    """The rows of one part under the names of their tensors, as ``DTensor.to_local`` has them."""
    return {(m[1] if (m := _ROWS.fullmatch(name)) else name): tensor for name, tensor in state.items()}


class _Ranks:
    """What ranks tell one another: each step is done by all, and goes well on all or fails on all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise PulseError("shards need a process group: use dist_lib.comm.distributed() or launch()")
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def together(self, what: str, work: Callable[[], R]) -> list[R]:
        """Results of all ranks in order.

        Raises:
            ShardError: another rank failed.
            Exception: this one did.
        """
        error, value = None, None
        try:
            value = work()
        except Exception as caught:
            error = caught
        told: list[Any] = [None] * self.world
        mine = (None if error is None else f"{type(error).__name__}: {error}", value)
        dist.all_gather_object(told, mine, group=self.group)
        if error is not None:
            raise error
        failed = {rank: said for rank, (said, _) in enumerate(told) if said is not None}
        if failed:
            raise ShardError(f"could not {what}: " + "; ".join(f"rank {r}: {said}" for r, said in failed.items()))
        return [result for _, result in told]


@dataclass
class _Held:
    """A part that was published, or may have been."""

    version: int
    part: Part
    state: dict[str, Tensor]
    digest: StateDigest


@dataclass(frozen=True)
class _Report:
    """What a rank says at the start of a publication: bases it could take, and (first rank) what the store has."""

    held: int | None
    tried: tuple[int, str] | None
    newest: int | None = None
    parts: tuple[str, ...] = ()
    anchor: int | None = None


class ShardedPublisher:
    """Publishes states whose tensors are spread over the ranks of a group. Every method is called by all of them.

    Args:
        publisher: with the store and all options; this rank's own. Only the first rank's ever commits.
        group: default: all ranks.

    The first version after a start is an anchor, and so is the next one after a failure whose outcome is not the same
    to all ranks.

    Raises:
        PulseError: there is no process group.
        AgreementError: ranks have different options.
    """

    def __init__(self, publisher: Publisher, *, group: dist.ProcessGroup | None = None) -> None:
        self._ranks, self._publisher = _Ranks(group), publisher
        options = (publisher.codec, publisher.anchor_every, publisher.key is not None, publisher.allow_nonfinite)
        agree(options, what="the options of the sharded publisher", group=group)
        self._held: _Held | None = None
        self._tried: _Held | None = None

    @property
    def version(self) -> int | None:
        """The newest version that this rank knows to be visible; None before the first."""
        return None if self._held is None else self._held.version

    def _report(self) -> _Report:
        held = None if self._held is None else self._held.version
        tried = None if self._tried is None else (self._tried.version, self._tried.part.digest)
        if self._ranks.rank:
            return _Report(held, tried)
        store = self._publisher.store
        newest = newest_version(store, listed=True)
        anchors = markers(store, "anchor")
        parts: tuple[str, ...] = ()
        if newest is not None and newest != held:
            try:
                kind = "patch" if newest in markers(store, "patch") else "anchor"
                parts = tuple(p.digest for p in fetch(store, newest, kind).parts)
            except (CorruptPatchError, MissingObjectError):
                parts = ()
        return _Report(held, tried, newest, parts, max(anchors, default=None))

    def _settle(self, reports: list[_Report]) -> bool:
        """Take over what turned out to be published; whether all ranks hold the newest version now."""
        first, world = reports[0], self._ranks.world
        if first.newest is None:
            return False
        if all(report.held == first.newest for report in reports):
            return True
        wanted = [(first.newest, digest) for digest in first.parts]
        if len(wanted) == world and [report.tried for report in reports] == wanted:
            self._held = self._tried
            return True
        return False

    def publish(self, state: State) -> Published:
        """Publish a state as the next version.

        Args:
            state: this rank's view of it: see :func:`local_rows`.

        Returns:
            The version and the bytes of all ranks.

        Raises:
            ShardError: another rank failed; nothing was published, or (if it was the commit) maybe everything.
            StateError: two ranks have the same name, or see ``Publisher.publish``; nothing was published.
            OSError: the store failed.
        """
        start = time.monotonic()
        reports = self._ranks.together("look up what is published", self._report)
        based = self._settle(reports)
        newest, anchor = reports[0].newest, reports[0].anchor
        version = 0 if newest is None else newest + 1
        due = based and version - (-1 if anchor is None else anchor) >= self._publisher.anchor_every
        base = self._held if based else None
        staged = self._ranks.together("store the parts", lambda: self._stage(state, version, base, due))
        names = [name for _, _, own in staged for name in own]
        if len(set(names)) < len(names):
            raise StateError(f"several ranks have {sorted({n for n in names if names.count(n) > 1})[:5]}")
        parts = [part for part, _, _ in staged]
        anchors = [part for _, part, _ in staged if part is not None]

        def commit() -> None:
            if self._ranks.rank == 0:
                self._publisher.publish_parts(version, base.version if base else None, parts, anchors)

        self._ranks.together(f"commit version {version}", commit)
        self._held, self._tried = self._tried, None
        sizes = sum(p.size for p in parts), sum(p.size for p in anchors)
        seconds = time.monotonic() - start
        return Published(version, *(sizes if base else (0, sizes[0])), seconds)

    def _stage(self, state: State, version: int, base: _Held | None, due: bool) -> tuple[Part, Part | None, list[str]]:
        local = local_rows(state, rank=self._ranks.rank)
        if not self._publisher.allow_nonfinite:
            refuse_nonfinite(local)
        workers, now = self._publisher.workers, snapshot(local)

        def store(made: Any) -> Part:
            return self._publisher.stage(encode(made, self._publisher.codec, workers=workers))

        if base is None:
            made = diff(None, now, version=version, workers=workers)
        else:
            made = diff(
                base.state, now, base_version=base.version, version=version, base_digest=base.digest, workers=workers
            )
        part = store(made)
        beside = store(diff(None, now, version=version, workers=workers)) if due else None
        self._tried = _Held(version, part, now, StateDigest(made.digest, made.tensor_digests))
        return part, beside, list(now)


def poll_together(subscriber: Subscriber, *, group: dist.ProcessGroup | None = None) -> Update | None:
    """Let every rank of a group go to the same version, or none: the newest that all of them see.

    Args:
        subscriber: this rank's own, of the whole state or of a part.
        group: default: all ranks.

    Returns:
        This rank's update; None if nothing is newer for all.

    Raises:
        ShardError: another rank could not get there; this one serves what it served before.
        PulseError, OSError: this one could not.
    """
    ranks = _Ranks(group)
    seen = ranks.together("look up the newest version", lambda: newest_version(subscriber.store))
    if any(version is None for version in seen):
        return None
    wanted = min(version for version in seen if version is not None)
    before = subscriber.saved()

    def go() -> tuple[int | None, Update | None]:
        update = subscriber.poll(most=wanted)
        return subscriber.version, update

    try:
        reached = ranks.together(f"reach version {wanted}", go)
        if len({version for version, _ in reached}) > 1:
            raise ShardError(f"ranks reached different versions: {[version for version, _ in reached]}")
    except BaseException:
        subscriber.restore(before)
        raise
    return reached[ranks.rank][1]
