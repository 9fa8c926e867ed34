"""The trainer's side: each state becomes the next version, as a patch and from time to time as an anchor beside it.

The order of writes is payload, manifest, marker; only when the marker is there does the publisher's own base move on.
So a crash between any two writes leaves the store at the old version, and a publisher that comes back finds out which
one that is by reading it as a subscriber would.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_lib.pulse.errors import CorruptPatchError, PulseError, StateError
from dist_lib.pulse.manifest import (
    Head,
    Manifest,
    Part,
    commit,
    fetch,
    marker_name,
    public_bytes,
    write_head,
)
from dist_lib.pulse.patch import diff, encode
from dist_lib.pulse.state import State, StateDigest, find_ties
from dist_lib.pulse.store import MissingObjectError, Store, content_name
from dist_lib.pulse.subscriber import Subscriber, newest_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """What is kept.

    Attributes:
        anchors: newest anchors to keep, at least 2; patches from the oldest of them on are kept too.
        min_age_s: nothing younger is deleted, whatever its version: the time that the slowest receiver may need.
    """

    anchors: int = 2
    min_age_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.anchors < 2 or self.min_age_s < 0:
            raise ValueError(f"at least 2 anchors and an age of at least 0 s are kept, not {self}")


@dataclass(frozen=True)
class Published:
    """What one publication wrote.

    Attributes:
        version: its number.
        patch_bytes, anchor_bytes: payloads; 0 where there was none of that kind.
        seconds: from the call to the visible marker.
    """

    version: int
    patch_bytes: int
    anchor_bytes: int
    seconds: float


def snapshot(state: State) -> dict[str, Tensor]:
    """A copy of a state on the CPU whose ties are kept."""
    ties = find_ties(state)
    copies = {n: t.detach().to("cpu", copy=True) for n, t in state.items() if n not in ties}
    return {name: copies[ties.get(name, name)] for name in state}


class Publisher:
    """Publishes states of one run into one store; only one may write there at a time.

    Args:
        store: where to.
        codec: for changes: ``"small"``, ``"fast"`` or ``"paper"``.
        anchor_every: an anchor is written beside every so manieth version, and beside the first.
        key: Ed25519 private key to sign with; None for no signatures.
        retention: what is kept; None to delete nothing.
        allow_nonfinite: whether states with NaN or infinities are published.
        clock: seconds since 1970.
        workers: threads; None for two.

    A publisher on a store with versions continues after the newest one that can be read.

    Raises:
        ValueError: ``anchor_every`` below 1.
    """

    def __init__(
        self,
        store: Store,
        *,
        codec: str = "small",
        anchor_every: int = 30,
        key: Any = None,
        retention: Retention | None = None,
        allow_nonfinite: bool = False,
        clock: Callable[[], float] = time.time,
        workers: int | None = None,
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"an anchor is written every 1 or more versions, not every {anchor_every}")
        self.store, self.codec, self.anchor_every, self.key = store, codec, anchor_every, key
        self.retention, self.allow_nonfinite, self.clock, self.workers = retention, allow_nonfinite, clock, workers
        self._base: dict[str, Tensor] | None = None
        self._digest: StateDigest | None = None
        self._version: int | None = None
        self._anchors: list[int] = []
        self._sure = False

    @property
    def version(self) -> int | None:
        """The newest version that this publisher knows to be visible; None before the first."""
        return self._version

    def resume(self) -> int | None:
        """Find out what is published, and take it as the base of the next patch; None for an empty store.

        Called by :meth:`publish` at first and after an error. If the newest version cannot be read, the next one is
        an anchor.
        """
        self._base, self._digest, self._anchors = None, None, []
        self._version = newest_version(self.store, listed=True)
        if self._version is not None:
            self._anchors = [v for v in markers(self.store, "anchor") if v <= self._version]
            reader = Subscriber(self.store, public_key=public_bytes(self.key) if self.key else None)
            try:
                reader.poll()
            except (CorruptPatchError, MissingObjectError) as error:
                logger.warning("version %d cannot be read (%s): the next one is an anchor", self._version, error)
            if reader.version == self._version and reader.state is not None:
                self._base, self._digest = dict(reader.state), reader.digest
        self._sure = True
        return self._version

    def publish(self, state: State) -> Published:
        """Publish a state as the next version.

        Args:
            state: what receivers shall hold, cast already as they use it; read, not kept.

        Raises:
            StateError: non-finite values, or no state at all; nothing was written.
            ObjectExistsError: another publisher wrote this version.
            OSError: the store failed. The version may or may not be visible: the next call finds out first.
        """
        start = time.monotonic()
        if not self.allow_nonfinite:
            refuse_nonfinite(state)
        if not self._sure:
            self.resume()
        self._sure = False
        version = 0 if self._version is None else self._version + 1
        now = snapshot(state)
        patch_bytes = anchor_bytes = 0
        if self._base is not None and self._version is not None:
            made = diff(
                self._base,
                now,
                base_version=self._version,
                version=version,
                base_digest=self._digest,
                workers=self.workers,
            )
            data = encode(made, self.codec, workers=self.workers)
            self._commit("patch", version, self._version, [self.stage(data)])
            patch_bytes, digest = len(data), StateDigest(made.digest, made.tensor_digests)
        else:
            anchor_bytes, digest = self._anchor(now, version)
        self._base, self._digest, self._version = now, digest, version
        seconds = time.monotonic() - start
        if not anchor_bytes and version - max(self._anchors, default=-self.anchor_every) >= self.anchor_every:
            anchor_bytes, _ = self._anchor(now, version)
        self._finish()
        self._sure = True
        return Published(version, patch_bytes, anchor_bytes, seconds)

    def stage(self, data: bytes) -> Part:
        """Store one payload; it is part of nothing until it is committed."""
        return Part(self.store.put_content(data), len(data))

    def publish_parts(
        self, version: int, base_version: int | None, parts: Sequence[Part], anchor: Sequence[Part] = ()
    ) -> None:
        """Commit payloads that several ranks staged, each over names of its own, as one version.

        Args:
            version: the next one.
            base_version: what the parts are patches of; None if all are anchors.
            parts: of all ranks, in order of rank.
            anchor: parts of an anchor of the same version to commit beside the patch; none for no anchor.

        Raises:
            ValueError: no parts, or not the next version.
        """
        newest = newest_version(self.store, listed=True)
        if not parts or version != (0 if newest is None else newest + 1):
            raise ValueError(f"{len(parts)} parts as version {version}: the newest here is {newest}")
        kind = "anchor" if base_version is None else "patch"
        self._commit(kind, version, base_version, parts)
        self._version, self._sure = version, False
        if anchor:
            self._commit("anchor", version, None, anchor)
        self._anchors = markers(self.store, "anchor")
        self._finish()

    def _anchor(self, state: State, version: int) -> tuple[int, StateDigest]:
        made = diff(None, state, version=version, workers=self.workers)
        data = encode(made, self.codec, workers=self.workers)
        self._commit("anchor", version, None, [self.stage(data)])
        self._anchors.append(version)
        return len(data), StateDigest(made.digest, made.tensor_digests)

    def _commit(self, kind: str, version: int, base: int | None, parts: Sequence[Part]) -> None:
        commit(self.store, Manifest(kind, version, base, tuple(parts), self.clock()), self.key)
        logger.info("published %s %d, %d bytes", kind, version, sum(p.size for p in parts))

    def _finish(self) -> None:
        if self._version is not None:
            write_head(self.store, Head(self._version, tuple(sorted(self._anchors, reverse=True))))
        if self.retention is not None:
            clean(self.store, self.retention, clock=self.clock)
            self._anchors = markers(self.store, "anchor")


def refuse_nonfinite(state: State) -> None:
    """Raise StateError, which names the tensor, if a state has NaN or infinite values."""
    for name, tensor in state.items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2:
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise StateError(f"{name!r} has NaN or infinite values; nothing was published")


def markers(store: Store, kind: str) -> list[int]:
    """Versions that have a marker of a kind, ascending; OSError if the store cannot be listed."""
    names = [n.rpartition("/")[2].partition(".") for n in store.names("versions")]
    return sorted(int(number) for number, _, suffix in names if suffix == kind and number.isdigit())


def clean(store: Store, retention: Retention, *, clock: Callable[[], float] = time.time) -> list[str]:
    """Delete what no receiver within the retention needs; returns the names of deleted objects.

    Kept are the newest anchors that are complete, every patch from the oldest of them on, everything younger than
    ``min_age_s``, and all that these refer to. With fewer complete anchors than must be kept, and if any manifest that
    must be kept cannot be read, nothing is deleted. Markers go first, so that nothing visible ever refers to what is
    gone.

    Args:
        store: what to clean.
        retention: what to keep.
        clock: seconds since 1970.
    """
    found: dict[tuple[int, str], Manifest] = {}
    complete: list[int] = []
    for kind in ("anchor", "patch"):
        for version in markers(store, kind):
            try:
                found[version, kind] = fetch(store, version, kind)
            except PulseError as error:
                logger.warning("nothing is deleted: %s %d cannot be read: %s", kind, version, error)
                return []
            manifest = found[version, kind]
            if kind == "anchor" and all(store.size(content_name(p.digest)) == p.size for p in manifest.parts):
                complete.append(version)
    if len(complete) < retention.anchors:
        return []
    oldest = sorted(complete)[-retention.anchors]
    now = clock()
    keep = {key for key, m in found.items() if key[0] >= oldest or now - m.created < retention.min_age_s}
    gone = [marker_name(*key) for key in sorted(set(found) - keep)]
    used: set[str] = set()
    for version, kind in keep:
        used.update(content_name(p.digest) for p in found[version, kind].parts)
        used.add(content_name(hashlib.sha256(found[version, kind].write()).hexdigest()))
    listed = store.names("objects")
    gone += sorted(name for name, age in listed.items() if name not in used and age >= retention.min_age_s)
    for name in gone:
        store.delete(name)
    return gone
