"""The receiver's side: follow a store to its newest version by the cheapest path that works.

A receiver with the version before takes one patch, one that is further behind takes the chain of patches, and one
whose chain is broken, or that has nothing, takes the newest anchor that is whole and the patches after it. Every step
is a transaction: what is served is a published version at any time, and its digest was checked on the weights
themselves. A corrupt object is fetched once more before another path is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from dist_lib.pulse.errors import CorruptPatchError, LimitError, StaleBaseError
from dist_lib.pulse.format import Limits, Patch
from dist_lib.pulse.manifest import Manifest, Part, fetch, marker_name, read_head
from dist_lib.pulse.patch import apply, decode
from dist_lib.pulse.state import StateDigest, whole_digest
from dist_lib.pulse.store import MissingObjectError, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What one :meth:`Subscriber.poll` did.

    Attributes:
        previous: version before; None for none.
        version: version now.
        steps: kinds and versions that were applied in order, such as ``("anchor", 30), ("patch", 31)``.
        changed: names whose tensors are others than before, or are new.
        nbytes: payload bytes that were fetched, failed fetches included.
        seconds: in all.
    """

    previous: int | None
    version: int
    steps: tuple[tuple[str, int], ...]
    changed: tuple[str, ...]
    nbytes: int
    seconds: float


def _exists(store: Store, version: int) -> bool:
    return any(store.size(marker_name(version, kind)) is not None for kind in ("patch", "anchor"))


def _listed(store: Store, kind: str | None = None, *, needed: bool = False) -> list[int]:
    """Versions with a marker, ascending; empty where the store cannot be listed, unless that is ``needed``."""
    try:
        names = [n.rpartition("/")[2].partition(".") for n in store.names("versions")]
    except (OSError, RuntimeError, ValueError) as error:
        if needed:  # a store that fails is not an empty one
            raise
        logger.info("%s cannot be listed: %s", store.url, error)
        return []
    return sorted({int(n) for n, _, k in names if n.isdigit() and k in ((kind,) if kind else ("patch", "anchor"))})


def newest_version(store: Store, *, listed: bool = False) -> int | None:
    """The newest version whose marker is visible; None if there is none.

    The hint says where to look first; then the next numbers are tried. Without a hint that holds, the store is listed.

    Args:
        store: where.
        listed: list the store in any case, which also finds versions behind a gap.

    Raises:
        OSError: the store failed.
    """
    if listed:
        return max(_listed(store, needed=True), default=None)
    try:
        version = read_head(store).version
    except (MissingObjectError, CorruptPatchError):
        version = -1
    if version < 0 or not _exists(store, version):
        found = _listed(store)
        if found:
            return found[-1]
        version = -1
    while _exists(store, version + 1):
        version += 1
    return version if version >= 0 else None


class Subscriber:
    """Holds the newest verified version of a run.

    Args:
        store: where from.
        public_key: 32 bytes of the publisher's Ed25519 key; nothing else is accepted then. None accepts unsigned ones.
        limits: what is granted to patches.
        workers: threads; None for two.
        part: ``(2, 4)`` to fetch only the third part of versions in four parts, such as the rows of one rank (see
            :mod:`~dist_lib.pulse.shards`); None for everything.

    ``state``, ``version`` and ``digest`` are of the version that is served, None before the first. Each state is a new
    mapping; its unchanged tensors are those of the one before. Do not write to them.
    """

    def __init__(
        self,
        store: Store,
        *,
        public_key: bytes | None = None,
        limits: Limits | None = None,
        workers: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        if public_key is not None and len(public_key) != 32:
            raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
        if part is not None and not 0 <= part[0] < part[1]:
            raise ValueError(f"part {part[0]} of {part[1]}: parts are counted from 0")
        self.part = part
        self.store, self.public_key, self.workers = store, public_key, workers
        self.limits = limits or Limits()
        self.state: Mapping[str, Tensor] | None = None
        self.version: int | None = None
        self.digest: StateDigest | None = None
        self._parts: list[tuple[dict[str, Tensor], StateDigest]] = []
        self._bytes = 0

    def poll(self, *, most: int | None = None) -> Update | None:
        """Go to the newest version that can be reached; None if there is nothing newer.

        Args:
            most: do not go beyond this version; None for no limit.

        Raises:
            CorruptPatchError: newer versions are there, but all paths to any of them are damaged. What is served stays.
            MissingObjectError: newer versions are there, but their objects are not. What is served stays.
            OSError: the store failed. What is served stays, or is a newer version than before.
        """
        start, previous, before = time.monotonic(), self.version, self.state
        self._bytes = 0
        newest = newest_version(self.store)
        if newest is not None and most is not None:
            newest = min(newest, most)
        if newest is None or (previous is not None and newest <= previous):
            return None
        steps, failure = self._chain(newest), None
        if self.version != newest:
            for anchor in self._anchors(newest):
                try:
                    self._step(anchor, "anchor")
                except (CorruptPatchError, MissingObjectError) as error:
                    failure = failure or error
                    logger.warning("anchor %d is of no use: %s", anchor, error)
                    continue
                steps += [("anchor", anchor), *self._chain(newest)]
                if self.version == newest:
                    break
        if self.version is None or not steps:
            raise failure or MissingObjectError(f"version {newest} is published, but no path leads there")
        old = before or {}
        changed = tuple(n for n, t in (self.state or {}).items() if old.get(n) is not t)
        return Update(previous, self.version, tuple(steps), changed, self._bytes, time.monotonic() - start)

    def saved(self) -> tuple[object, ...]:
        """What is served now, for :meth:`restore`; nothing is copied."""
        return self.version, self.state, self.digest, self._parts

    def restore(self, saved: tuple[object, ...]) -> None:
        """Serve what was served when :meth:`saved` was called."""
        self.version, self.state, self.digest, self._parts = saved  # type: ignore[assignment]

    def follow(self, *, interval_s: float = 1.0, until: int | None = None) -> Iterator[Update]:
        """Poll for ever and yield each update.

        Args:
            interval_s: pause between polls that found nothing.
            until: stop when this version is reached; None to go on.

        Transient failures of the store and paths that are damaged for now are logged and tried again.
        """
        while until is None or self.version is None or self.version < until:
            try:
                update = self.poll()
            except (OSError, CorruptPatchError, MissingObjectError) as error:
                logger.warning("serving version %s; %s", self.version, error)
                update = None
            if update is None:
                time.sleep(interval_s)
            else:
                yield update

    def _chain(self, newest: int) -> list[tuple[str, int]]:
        """Apply patches one by one as far as they lead."""
        steps: list[tuple[str, int]] = []
        while self.version is not None and self.version < newest:
            following = self.version + 1
            try:
                self._step(following, "patch")
            except MissingObjectError:
                break
            except (CorruptPatchError, StaleBaseError) as error:
                logger.warning("patch %d is of no use: %s", following, error)
                break
            steps.append(("patch", following))
        return steps

    def _anchors(self, newest: int) -> list[int]:
        """Anchors above the served version, newest first."""
        found: set[int] = set(_listed(self.store, "anchor"))
        try:
            found.update(read_head(self.store).anchors)
        except (MissingObjectError, CorruptPatchError):
            logger.info("no hint of anchors")
        found.update({newest, 0} - found)
        floor = -1 if self.version is None else self.version
        return sorted((v for v in found if floor < v <= newest), reverse=True)

    def _step(self, version: int, kind: str) -> None:
        """Fetch, verify and swap to one version; what is corrupt is fetched once more, what is whole is kept."""
        failures: set[str] = set()
        got: dict[Part, Patch] = {}
        while True:
            try:
                manifest = fetch(self.store, version, kind, self.public_key)
                wanted = self._wanted(manifest)
                for part in wanted:
                    got[part] = got.get(part) or self._payload(manifest, part)
                self._apply(manifest, [got[part] for part in wanted])
                return
            except LimitError:
                raise
            except CorruptPatchError as error:
                if str(error) in failures or len(failures) > 1 + len(got):
                    raise
                failures.add(str(error))
                logger.warning("%s %d is corrupt, fetched again: %s", kind, version, error)

    def _wanted(self, manifest: Manifest) -> tuple[Part, ...]:
        if self.part is None:
            return manifest.parts
        index, count = self.part
        if len(manifest.parts) != count:
            raise MissingObjectError(
                f"version {manifest.version} has {len(manifest.parts)} parts, not the {count} of which {index} is taken"
            )
        return (manifest.parts[index],)

    def _payload(self, manifest: Manifest, part: Part) -> Patch:
        if part.size > self.limits.state_bytes + self.limits.header_bytes:
            raise LimitError(f"a payload of {part.size} bytes; granted are {self.limits.state_bytes}")
        data = self.store.get_content(part.digest, part.size)
        self._bytes += len(data)
        patch = decode(data, self.limits)
        if (patch.version, patch.base_version) != (manifest.version, manifest.base_version):
            raise CorruptPatchError(
                f"the payload of version {manifest.version} leads from {patch.base_version} to {patch.version}"
            )
        return patch

    def _apply(self, manifest: Manifest, patches: list[Patch]) -> None:
        if manifest.kind == "patch" and (manifest.base_version != self.version or len(patches) != len(self._parts)):
            raise StaleBaseError(
                f"version {manifest.version} needs version {manifest.base_version} in {len(patches)} parts, but "
                f"{self.version} in {len(self._parts)} parts is here"
            )
        parts: list[tuple[dict[str, Tensor], StateDigest]] = []
        for i, patch in enumerate(patches):
            base, known = ({}, None) if patch.is_anchor else self._parts[i]
            new = apply(patch, base, known=known, workers=self.workers)
            parts.append((new, StateDigest(patch.digest, patch.tensor_digests)))
        merged: dict[str, Tensor] = {}
        for new, _ in parts:
            twice = set(merged) & set(new)
            if twice:
                raise CorruptPatchError(f"{sorted(twice)[:5]} are in several parts of version {manifest.version}")
            merged.update(new)
        specs = {n: s for p in patches for n, s in p.specs.items()}
        digests = {n: d for _, digest in parts for n, d in digest.tensors.items()}
        digest = parts[0][1] if len(parts) == 1 else StateDigest(whole_digest(specs, digests), digests)
        self._parts, self.state, self.version, self.digest = parts, merged, manifest.version, digest
