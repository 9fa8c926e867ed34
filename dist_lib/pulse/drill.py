"""Break the protocol on purpose and watch: one publisher, one store in memory, one receiver, one fault.

Every event comes from the library's own :class:`~dist_lib.pulse.Publisher` and :class:`~dist_lib.pulse.Subscriber`
running on stores that write down what passes through them; nothing is scripted but the fault. Version 0 is there from
the beginning; the fault strikes while version 1 is published or fetched; then the publisher goes on.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dist_lib.pulse.errors import CorruptPatchError
from dist_lib.pulse.format import MAGIC, read
from dist_lib.pulse.manifest import read_manifest
from dist_lib.pulse.publisher import Publisher
from dist_lib.pulse.state import digest_state
from dist_lib.pulse.store import MissingObjectError, Retry, Store
from dist_lib.pulse.subscriber import Subscriber

Part = Literal["payload", "manifest", "marker"]
PARTS: Sequence[Part] = ("payload", "manifest", "marker")
FAULTS: Mapping[str, str] = {
    "none": "nothing goes wrong",
    "publisher dies": "the publisher dies just before this write",
    "torn write": "half of the object is written, then the publisher dies",
    "lost": "the store loses the object",
    "late": "the store shows the object only later",
    "flipped": "one bit of the stored object flips",
    "flipped once": "one bit flips on the way to the receiver, once",
    "receiver dies": "the receiver dies after this read",
}


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: ``"write"``, ``"read"``, or ``"publisher"``, ``"store"``, ``"receiver"`` for a note about one of them.
        text: what, in a few words.
        good: False for a fault, and for whatever was missing or refused.
    """

    kind: Literal["write", "read", "publisher", "store", "receiver"]
    text: str
    good: bool = True


@dataclass(frozen=True)
class Drill:
    """What one run did.

    Attributes:
        fault, part: what went wrong, and with which object of version 1.
        events: in order.
        served: version that the receiver served after each of its polls.
        identical: whether all that it served was published, bit for bit.
    """

    fault: str
    part: Part
    events: tuple[Event, ...]
    served: tuple[int | None, ...]
    identical: bool


class _Crash(BaseException):
    """The process is gone."""


@dataclass
class _Scene:
    fault: str
    part: Part
    events: list[Event] = field(default_factory=list)
    named: dict[str, tuple[str, str]] = field(default_factory=dict)
    wanted: dict[str, bytes] = field(default_factory=dict)
    armed: bool = False

    def strikes(self, name: str, *faults: str) -> bool:
        """Whether the fault is one of these and meets this object now."""
        part, of = self.named.get(name, ("", ""))
        return self.armed and self.fault in faults and (part, of) == (self.part, "patch 1")

    def label(self, name: str) -> str:
        part, of = self.named.get(name) or self._marker(name)
        return of if part == "payload" else f"{part} of {of}" if of else "hint"

    @staticmethod
    def _marker(name: str) -> tuple[str, str]:
        number, _, kind = name.rpartition("/")[2].partition(".")
        return ("marker", f"{kind} {int(number)}") if name.startswith("versions/") else ("", "")

    def learn(self, name: str, data: bytes) -> None:
        """Remember what an object is; what it is can be read from its first writing."""
        if data[: len(MAGIC)] == MAGIC:
            patch = read(data)
            self.named[name] = "payload", f"{'anchor' if patch.is_anchor else 'patch'} {patch.version}"
        elif name.startswith("objects/"):
            manifest = read_manifest(data)
            self.named[name] = "manifest", f"{manifest.kind} {manifest.version}"
        elif name.startswith("versions/"):
            self.named[name] = self._marker(name)
        self.wanted[name] = data


@dataclass
class _Watched(Store):
    """A store whose traffic of one side is written down, and which fails where the scene says so."""

    scene: _Scene = field(default_factory=lambda: _Scene("none", "payload"))
    receiving: bool = False

    def put(self, name: str, data: bytes) -> None:
        if self.receiving:
            super().put(name, data)
            return
        scene = self.scene
        scene.learn(name, data)
        if scene.strikes(name, "publisher dies"):
            scene.events.append(Event("publisher", f"dies before writing {scene.label(name)}", False))
            raise _Crash
        torn = scene.strikes(name, "torn write")
        super().put(name, data[: len(data) // 2] if torn else data)
        scene.events.append(Event("write", f"half of {scene.label(name)}" if torn else scene.label(name), not torn))
        if torn:
            scene.events.append(Event("publisher", "dies", False))
            raise _Crash

    def get(self, name: str, most: int) -> bytes:
        if not self.receiving:
            return super().get(name, most)
        scene, label = self.scene, self.scene.label(name)
        try:
            if scene.strikes(name, "late"):
                raise MissingObjectError(f"{label} cannot be seen yet")
            data = super().get(name, most)
        except MissingObjectError:
            scene.events.append(Event("read", f"{label}: not there", False))
            raise
        flip = scene.strikes(name, "flipped once")
        sound = data == scene.wanted.get(name, data) and not flip
        scene.events.append(Event("read", label if sound else f"{label}: damaged", sound))
        if flip:
            scene.armed = False
            return bytes([data[0] ^ 1]) + data[1:]
        if scene.strikes(name, "receiver dies"):
            raise _Crash
        return data

    def size(self, name: str) -> int | None:
        hidden = self.receiving and self.scene.strikes(name, "late")
        return None if hidden else super().size(name)

    def names(self, folder: str) -> dict[str, float]:
        found = super().names(folder)
        return {n: a for n, a in found.items() if not (self.receiving and self.scene.strikes(n, "late"))}


def _states() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    states = [{"w": (torch.randn(64, 64, generator=generator) * 0.02).bfloat16()}]
    for step in (1, 2):
        w = states[-1]["w"].clone()
        w.view(torch.int16).view(-1)[step::97] ^= 1
        states.append({"w": w})
    return states


def run_drill(fault: str, part: Part) -> Drill:
    """Publish versions 0, 1 and 2 with a fault at one object of version 1, and follow them.

    Args:
        fault: a key of ``FAULTS``.
        part: of version 1's patch that it meets.

    Raises:
        ValueError: an unknown fault or part.
    """
    if fault not in FAULTS or part not in PARTS:
        raise ValueError(f"faults are {sorted(FAULTS)} at {PARTS}, not {fault!r} at {part!r}")
    scene, url, retry = _Scene(fault, part), f"memory://{uuid.uuid4()}", Retry(attempts=1)
    source = _Watched(url, retry=retry, scene=scene)
    sink = _Watched(url, retry=retry, scene=scene, receiving=True)
    states = _states()
    digests = {digest_state(s, workers=1).whole for s in states}
    publisher, receiver = Publisher(source, codec="paper", anchor_every=2, workers=1), Subscriber(sink, workers=1)
    publisher.publish(states[0])
    receiver.poll()
    scene.events, scene.armed, served, identical = [Event("receiver", "serves 0")], True, [receiver.version], True
    for state in states[1:]:
        try:
            publisher.publish(state)
        except _Crash:
            publisher = Publisher(source, codec="paper", anchor_every=2, workers=1)
            found = publisher.resume()
            scene.events.append(Event("publisher", f"starts again, finds {found}"))
        _damage(scene, source)
        receiver = _poll(scene, receiver, sink)
        served.append(receiver.version)
        if receiver.state is not None:
            identical = identical and digest_state(receiver.state, workers=1).whole in digests
        scene.armed = False
    return Drill(fault, part, tuple(scene.events), tuple(served), identical)


def _damage(scene: _Scene, store: Store) -> None:
    """Lose, hide or flip the object in the store, if that is the fault."""
    for name in list(scene.named):
        if scene.strikes(name, "lost"):
            store.delete(name)
            scene.events.append(Event("store", f"loses {scene.label(name)}", False))
        if scene.strikes(name, "late"):
            scene.events.append(Event("store", f"hides {scene.label(name)}", False))
        if scene.strikes(name, "flipped"):
            data = store.get(name, 1 << 20)
            Store.put(store, name, data[:-1] + bytes([data[-1] ^ 1]))
            scene.events.append(Event("store", f"{scene.label(name)}: a bit flips", False))


def _poll(scene: _Scene, receiver: Subscriber, store: Store) -> Subscriber:
    """Let the receiver look for news; one that dies is replaced by a new one that holds nothing."""
    before = receiver.version
    try:
        receiver.poll()
    except (CorruptPatchError, MissingObjectError):
        scene.events.append(Event("receiver", f"nothing usable yet, serves {receiver.version}", False))
        return receiver
    except _Crash:
        scene.events.append(Event("receiver", "dies", False))
        scene.armed = False
        receiver = Subscriber(store, workers=1)
        receiver.poll()
    now = "still " if receiver.version == before else ""
    scene.events.append(Event("receiver", f"serves {now}{receiver.version}"))
    return receiver
