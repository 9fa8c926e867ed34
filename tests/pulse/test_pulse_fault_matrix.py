"""Every kind of object, damaged in every way, at every step; and crashes between any two writes.

Whatever happens, a receiver holds the version that it held or one that was published, bit for bit. Cases are counted
and the count is printed.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable

import pytest
import torch

from dist_lib.pulse.errors import CorruptPatchError
from dist_lib.pulse.manifest import Head, load_key, marker_name, public_bytes, write_head
from dist_lib.pulse.publisher import Publisher
from dist_lib.pulse.state import digest_state
from dist_lib.pulse.store import MissingObjectError, Retry, Store
from dist_lib.pulse.subscriber import Subscriber, newest_version

KEY = load_key(bytes(range(32)))
QUICK = Retry(attempts=1, sleep=lambda s: None)


def memory() -> Store:
    return Store(f"memory://{uuid.uuid4()}", retry=QUICK)


def states(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    first = (torch.randn(12, 9, generator=generator) * 0.02).bfloat16()
    out = [{"w": first, "b": torch.zeros(4)}]
    for step in range(1, count):
        w = out[-1]["w"].clone()
        w.view(torch.int16).view(-1)[step::13] ^= 1
        out.append({"w": w, "b": out[-1]["b"] + step})
    return out


RUN = states(6)
WHOLE = [digest_state(state).whole for state in RUN]


def copy(store: Store) -> dict[str, bytes]:
    return {name: store.get(name, 1 << 20) for name in [*store.names("objects"), *store.names("versions"), "head"]}


def publish_run() -> list[dict[str, bytes]]:
    """Contents of the store after each version; anchors beside versions 0, 2 and 4."""
    store, after = memory(), []
    publisher = Publisher(store, anchor_every=2, key=KEY, clock=lambda: 1.0, workers=1)
    for state in RUN:
        publisher.publish(state)
        after.append(copy(store))
    return after


@pytest.fixture(scope="module")
def published() -> list[dict[str, bytes]]:
    return publish_run()


def damage(objects: dict[str, bytes], name: str, older: dict[str, bytes]) -> dict[str, bytes | None]:
    """Ways to damage one object: what it holds instead, None for nothing."""
    data = objects[name]
    kin = sorted(n for n in objects if n.split("/")[0] == name.split("/")[0] and n != name)
    ways: dict[str, bytes | None] = {
        "dropped": None,
        "emptied": b"",
        "cut": data[: len(data) // 2],
        "cut by one": data[:-1],
        "longer": data + b"\0",
        "doubled": data + data,
        "swapped with another": objects[kin[0]] if kin else b"{}",
        "swapped with the next": objects[kin[-1]] if kin else b"[]",
    }
    for part in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        at = int(part * len(data))
        ways[f"bit flipped at {part}"] = data[:at] + bytes([data[at] ^ (1 << (at % 8))]) + data[at + 1 :]
    if older.get(name, data) != data:
        ways["stale"] = older[name]
    return ways


def load(store: Store, objects: dict[str, bytes]) -> None:
    for name, data in objects.items():
        store.put(name, data)


def receive(store: Store, start: Callable[[], Subscriber]) -> tuple[int | None, int | None]:
    """Poll; check what is served; return the versions before and after."""
    subscriber = start()
    before = subscriber.version
    try:
        subscriber.poll()
    except (CorruptPatchError, MissingObjectError):
        assert subscriber.version == before
    if subscriber.version is None:
        assert subscriber.state is None
    else:
        assert subscriber.state is not None
        assert digest_state(subscriber.state, workers=1).whole == WHOLE[subscriber.version]
        assert before is None or subscriber.version >= before
    return before, subscriber.version


def twin(subscriber: Subscriber) -> Subscriber:
    """Another subscriber that holds the same version."""
    other = Subscriber(subscriber.store, public_key=subscriber.public_key, workers=1)
    other.version, other.state, other.digest = subscriber.version, subscriber.state, subscriber.digest
    other._parts = subscriber._parts
    return other


def run_matrix(published: list[dict[str, bytes]]) -> dict[str, int]:
    """Damage each object in each way before a receiver that holds nothing, version 1 or version 4; count outcomes."""
    objects, counts = published[-1], {"newest": 0, "older or same": 0, "nothing": 0}
    for held in (None, 1, 4):
        store = memory()
        load(store, objects if held is None else published[held])

        ready = Subscriber(store, public_key=public_bytes(KEY), workers=1)
        if held is not None:
            ready.poll()
            assert ready.version == held
            load(store, objects)
        for name in objects:
            for content in damage(objects, name, published[2]).values():
                if content is None:
                    store.delete(name)
                else:
                    store.put(name, content)
                _, now = receive(store, lambda ready=ready: twin(ready))
                counts["nothing" if now is None else "newest" if now == 5 else "older or same"] += 1
                store.put(name, objects[name])
        assert receive(store, lambda ready=ready: twin(ready))[1] == 5  # all is healed, so it was the damage
    return counts


def test_every_object_damaged_in_every_way(published: list[dict[str, bytes]]) -> None:
    counts = run_matrix(published)
    total = sum(counts.values())
    print(f"{total} cases: {counts}")
    assert total > 500 and counts["newest"] > total // 2 and counts["older or same"] > 0


class Crash(BaseException):
    """The process is gone."""


def crash_at(store: Store, write: int, after: bool, torn: bool) -> None:
    """Let the store die at its ``write``-th write: before it, after it, or (a bad store) in the middle of it."""
    put, done = store.put, [0]

    def dying(name: str, data: bytes) -> None:
        if done[0] == write:
            if after:
                put(name, data)
            elif torn:
                put(name, data[: len(data) // 2])
            raise Crash
        done[0] += 1
        put(name, data)

    store.put = dying  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["before", "after", "torn"])
def test_publisher_crashes_between_any_two_writes(how: str) -> None:
    """Version 1 is patch only, version 2 has an anchor too; the old or the new version is visible, and it goes on."""
    cases = 0
    for version in (0, 1, 2):
        for write in range(8):
            store = memory()
            publisher = Publisher(store, anchor_every=2, key=KEY, workers=1)
            for state in RUN[:version]:
                publisher.publish(state)
            receiver = Subscriber(store, public_key=public_bytes(KEY), workers=1)
            receiver.poll()
            healthy = store.put
            crash_at(store, write, how == "after", how == "torn")
            try:
                publisher.publish(RUN[version])
            except Crash:
                cases += 1
            else:
                break
            store.put = healthy  # type: ignore[method-assign]
            _, now = receive(store, lambda store=store: Subscriber(store, public_key=public_bytes(KEY), workers=1))
            assert now in (version, version - 1 if version else None)
            back = Publisher(store, anchor_every=2, key=KEY, workers=1)
            done = back.publish(RUN[3])
            assert done.version >= version
            receiver.poll()
            late = Subscriber(store, public_key=public_bytes(KEY), workers=1)
            late.poll()
            for subscriber in (receiver, late):
                assert subscriber.version == done.version and subscriber.state is not None
                assert digest_state(subscriber.state).whole == WHOLE[3]
    print(f"{cases} crashes {how} a write")
    assert cases >= 14


def test_a_stale_or_lying_hint_changes_nothing(published: list[dict[str, bytes]]) -> None:
    store = memory()
    load(store, published[-1])
    for version, anchors in ((0, (0,)), (3, (2,)), (99, (98, 4)), (5, ()), (5, (3, 1))):
        write_head(store, Head(version, anchors))
        subscriber = Subscriber(store, public_key=public_bytes(KEY), workers=1)
        subscriber.poll()
        assert subscriber.version == 5 == newest_version(store)


def test_marker_before_payload_would_be_caught() -> None:
    """A publisher that writes its marker first shows a version that nobody can load; receivers stay where they are."""
    store = memory()
    publisher = Publisher(store, anchor_every=30, key=KEY, workers=1)
    publisher.publish(RUN[0])
    receiver = Subscriber(store, workers=1)
    receiver.poll()
    publisher.publish(RUN[1])
    manifest = receiver.store.names("objects")
    marker = store.get(marker_name(1, "patch"), 4096)
    for name in manifest:  # as if payload and manifest were still on their way
        store.delete(name)
    assert store.get(marker_name(1, "patch"), 4096) == marker
    with pytest.raises(MissingObjectError):
        receiver.poll()
    assert receiver.version == 0


KILLER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from dist_lib.pulse.publisher import Publisher, Retention
from dist_lib.pulse.store import Store
from dist_lib.pulse.subscriber import Subscriber

folder, kills = sys.argv[1], int(sys.argv[2])

def publish():
    publisher = Publisher(Store(folder), codec="paper", anchor_every=3, retention=Retention(2, 0.0), workers=1)
    newest, w = publisher.resume(), torch.zeros(5000, dtype=torch.bfloat16)
    for version in range(0 if newest is None else newest + 1, 10**6):
        w[version % 4000 + 2] = version % 251
        w[0], w[1] = version // 256, version % 256
        assert publisher.publish({"w": w}).version == version

reader, moments = Subscriber(Store(folder), workers=1), random.Random(0)
for kill in range(kills):
    child = os.fork()
    if child == 0:
        try:
            publish()
        finally:
            os._exit(1)
    wanted = 0 if reader.version is None else reader.version + 1
    names = [os.path.join(folder, "versions", f"{wanted:020d}.{kind}") for kind in ("patch", "anchor")]
    while not any(map(os.path.exists, names)) and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.001)
    time.sleep(moments.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = reader.version
    reader.poll()
    if reader.version is not None:
        w = reader.state["w"].float()
        assert int(w[0]) * 256 + int(w[1]) == reader.version and (before is None or reader.version >= before)
        late = Subscriber(Store(folder), workers=1)
        late.poll()
        assert late.version == reader.version and late.digest == reader.digest
print(kills, reader.version)
"""


def test_publishers_killed_for_real(tmp_path: os.PathLike[str]) -> None:
    """Processes that publish as fast as they can, killed with SIGKILL at odd moments; the next one takes over.

    The content tells its version, so a mixture of two would be seen. Children are forked from a process that has
    imported everything.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), "20"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, version = map(int, done.stdout.split())
    print(f"{kills} processes killed, {version} versions")
    assert kills == 20 and version >= 19
