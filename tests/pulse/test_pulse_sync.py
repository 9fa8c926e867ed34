"""Publisher, store and subscriber: order of writes, chains, anchors, retention, signatures, several receivers."""

import functools
import http.server
import threading
import uuid
from pathlib import Path

import pytest
import torch

from dist_lib.pulse.errors import CorruptPatchError, LimitError, StateError
from dist_lib.pulse.format import Limits
from dist_lib.pulse.manifest import SignatureError, load_key, marker_name, public_bytes
from dist_lib.pulse.patch import diff, encode
from dist_lib.pulse.publisher import Publisher, Retention, clean
from dist_lib.pulse.state import digest_state
from dist_lib.pulse.store import MissingObjectError, ObjectExistsError, Retry, Store
from dist_lib.pulse.subscriber import Subscriber, newest_version

QUICK = Retry(attempts=3, sleep=lambda s: None)


def memory() -> Store:
    return Store(f"memory://{uuid.uuid4()}", retry=QUICK)


def states(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    master, out = torch.randn(40, 30, generator=generator) * 0.02, []
    for step in range(count):
        w = master.bfloat16()
        out.append({"embed": w, "head": w, "norm": torch.full((5,), 1.0 + step // 3)})
        master = master + 1e-5 * torch.randn(40, 30, generator=generator)
    return out


def same(subscriber: Subscriber, state: dict[str, torch.Tensor]) -> bool:
    return subscriber.state is not None and digest_state(subscriber.state).whole == digest_state(state).whole


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return memory() if request.param == "memory" else Store(str(tmp_path / "run"), retry=QUICK)


@pytest.mark.parametrize("codec", ["paper", "fast", "small"])
def test_fast_slow_and_late_receivers_hold_the_same_bits(store: Store, codec: str) -> None:
    publisher = Publisher(store, codec=codec, anchor_every=4)
    fast, slow = Subscriber(store), Subscriber(store)
    assert fast.poll() is None
    for version, state in enumerate(states(11)):
        done = publisher.publish(state)
        assert (done.version, done.anchor_bytes > 0, done.patch_bytes > 0) == (version, version % 4 == 0, version > 0)
        update = fast.poll()
        assert update is not None and update.steps == (("patch" if version else "anchor", version),)
        assert same(fast, state) and fast.poll() is None
        assert fast.state is not None and fast.state["head"].data_ptr() == fast.state["embed"].data_ptr()
        if version in (0, 3, 10):
            update = slow.poll()
            assert update is not None and update.version == version and same(slow, state)
    assert update is not None and update.steps == tuple(("patch", v) for v in range(4, 11))
    late = Subscriber(store)
    update = late.poll()
    assert update is not None and update.steps == (("anchor", 8), ("patch", 9), ("patch", 10))
    assert fast.digest == late.digest == slow.digest


def test_a_receiver_can_stop_at_a_version() -> None:
    store = memory()
    publisher = Publisher(store, anchor_every=3, workers=1)
    run = states(6)
    for state in run:
        publisher.publish(state)
    subscriber = Subscriber(store, workers=1)
    for most, steps in ((4, (("anchor", 3), ("patch", 4))), (4, None), (2, None), (9, (("patch", 5),))):
        update = subscriber.poll(most=most)
        assert (update.steps if update else None) == steps
        assert subscriber.version is not None and same(subscriber, run[subscriber.version])


def test_update_names_what_changed() -> None:
    store, run = memory(), states(3)
    publisher, subscriber = Publisher(store), Subscriber(store)
    publisher.publish(run[0])
    assert subscriber.poll() is not None
    publisher.publish(run[1])
    update = subscriber.poll()
    assert update is not None and update.changed == ("embed", "head")
    assert (update.previous, update.version) == (0, 1) and update.nbytes > 0


def test_a_broken_chain_recovers_through_the_next_anchor() -> None:
    store, run = memory(), states(9)
    publisher, subscriber = Publisher(store, anchor_every=3), Subscriber(store)
    publisher.publish(run[0])
    subscriber.poll()
    for state in run[1:]:
        publisher.publish(state)
    store.delete(marker_name(2, "patch"))
    update = subscriber.poll()
    assert update is not None and update.steps == (("patch", 1), ("anchor", 6), ("patch", 7), ("patch", 8))
    assert same(subscriber, run[8])


def test_what_is_served_stays_when_nothing_newer_is_whole() -> None:
    store, run = memory(), states(2)
    publisher, subscriber = Publisher(store, anchor_every=30), Subscriber(store)
    publisher.publish(run[0])
    subscriber.poll()
    publisher.publish(run[1])
    store.put(marker_name(1, "patch"), b"{}")
    with pytest.raises((CorruptPatchError, MissingObjectError)):
        subscriber.poll()
    assert subscriber.version == 0 and same(subscriber, run[0])


def test_a_local_base_that_was_written_to_is_replaced() -> None:
    store, run = memory(), states(5)
    publisher, subscriber = Publisher(store, anchor_every=2), Subscriber(store)
    publisher.publish(run[0])
    subscriber.poll()
    assert subscriber.state is not None
    subscriber.state["norm"][0] = 7.0
    for state in run[1:]:
        publisher.publish(state)
    update = subscriber.poll()
    assert update is not None and update.steps[0] == ("anchor", 4) and same(subscriber, run[4])


def test_publisher_comes_back(store: Store) -> None:
    run = states(6)
    first = Publisher(store, anchor_every=30)
    for state in run[:3]:
        first.publish(state)
    again = Publisher(store, anchor_every=30)
    done = again.publish(run[3])
    assert (done.version, done.anchor_bytes) == (3, 0)  # it read version 2 and goes on with a patch
    subscriber = Subscriber(store)
    subscriber.poll()
    assert subscriber.version == 3 and same(subscriber, run[3])
    store.put(marker_name(2, "patch"), b"{}")
    third = Publisher(store, anchor_every=30)
    done = third.publish(run[4])
    assert (done.version, done.patch_bytes) == (4, 0) and done.anchor_bytes > 0  # it could not, so an anchor
    subscriber.poll()
    assert subscriber.version == 4 and same(subscriber, run[4])


def test_a_second_publisher_is_refused() -> None:
    store, run = memory(), states(3)
    one, other = Publisher(store), Publisher(store)
    one.publish(run[0])
    other.resume()
    one.publish(run[1])
    with pytest.raises(ObjectExistsError, match="another publisher"):
        other.publish(run[2])
    assert other.publish(run[2]).version == 2  # after it looked again


def test_nonfinite_weights_are_not_published() -> None:
    store, state = memory(), states(1)[0]
    with pytest.raises(StateError, match="'norm'"):
        Publisher(store).publish({**state, "norm": torch.tensor([1.0, float("nan")])})
    assert newest_version(store) is None
    Publisher(store, allow_nonfinite=True).publish({**state, "norm": torch.tensor([1.0, float("nan")])})
    assert newest_version(store) == 0


def test_only_the_right_key_is_accepted() -> None:
    store, run = memory(), states(3)
    key, other = load_key(bytes(range(32))), load_key(bytes(32))
    Publisher(store, key=key).publish(run[0])
    good, bad = Subscriber(store, public_key=public_bytes(key)), Subscriber(store, public_key=public_bytes(other))
    assert good.poll() is not None and same(good, run[0])
    with pytest.raises(SignatureError, match="not signed with the key"):
        bad.poll()
    assert bad.state is None
    with pytest.raises(ValueError, match="32 bytes"):
        Subscriber(store, public_key=b"short")
    unsigned = memory()
    Publisher(unsigned).publish(run[0])
    with pytest.raises(SignatureError, match="not signed, but"):
        Subscriber(unsigned, public_key=public_bytes(key)).poll()
    store.put(marker_name(1, "anchor"), store.get(marker_name(0, "anchor"), 4096))  # signed, but another version
    with pytest.raises(CorruptPatchError, match="anchor 0"):
        good.poll()
    assert good.version == 0


def test_retention_keeps_what_receivers_need() -> None:
    store, run, now = memory(), states(20), [1000.0]
    retention = Retention(anchors=2, min_age_s=0.0)
    publisher = Publisher(store, anchor_every=5, retention=retention, clock=lambda: now[0])
    slow = Subscriber(store)
    for version, state in enumerate(run):
        publisher.publish(state)
        now[0] += 1
        if version == 12:
            slow.poll()
        late = Subscriber(store)
        late.poll()
        assert late.version == version and same(late, state)
    slow.poll()
    assert slow.version == 19 and same(slow, run[19])
    kept = sorted(n for n in store.names("versions"))
    assert kept == sorted(
        [*(marker_name(v, "patch") for v in range(10, 20)), *(marker_name(v, "anchor") for v in (10, 15))]
    )
    assert len(store.names("objects")) == 2 * len(kept)  # a payload and a manifest each, and no orphan


def test_retention_spares_the_young_and_is_careful() -> None:
    store, now = memory(), [1000.0]
    publisher = Publisher(store, anchor_every=1, clock=lambda: now[0])
    for state in states(6):
        publisher.publish(state)
        now[0] += 10
    before = store.names("versions")
    assert clean(store, Retention(min_age_s=3600.0), clock=lambda: now[0]) == []
    store.put(marker_name(3, "anchor"), b"damaged")
    assert clean(store, Retention(min_age_s=0.0), clock=lambda: now[0]) == []
    assert set(store.names("versions")) == set(before)
    with pytest.raises(ValueError, match="at least 2"):
        Retention(anchors=1)


def test_shards_of_several_ranks_are_one_version() -> None:
    store = memory()
    old = [{"w.0": torch.zeros(50)}, {"w.1": torch.ones(50), "b": torch.zeros(3)}]
    new = [{name: tensor.clone() for name, tensor in shard.items()} for shard in old]
    new[0]["w.0"][3], new[1]["w.1"][4] = 5.0, 6.0
    publisher, subscriber = Publisher(store), Subscriber(store)
    publisher.publish_parts(0, None, [publisher.stage(encode(diff(None, shard, version=0))) for shard in old])
    assert subscriber.poll() is not None
    parts = [publisher.stage(encode(diff(a, b, base_version=0), "small")) for a, b in zip(old, new, strict=True)]
    assert subscriber.poll() is None  # staged is not published
    publisher.publish_parts(1, 0, parts)
    update = subscriber.poll()
    assert update is not None and update.changed == ("w.0", "w.1")
    assert same(subscriber, {**new[0], **new[1]})
    with pytest.raises(ValueError, match="newest here is 1"):
        publisher.publish_parts(3, 1, parts)
    publisher.publish_parts(2, None, [publisher.stage(encode(diff(None, old[0], version=2)))] * 2)
    with pytest.raises(CorruptPatchError, match="several parts"):
        subscriber.poll()
    assert subscriber.version == 1


def test_limits_reach_the_subscriber() -> None:
    store = memory()
    Publisher(store).publish(states(1)[0])
    with pytest.raises(LimitError):
        Subscriber(store, limits=Limits(state_bytes=100)).poll()


def test_transient_failures_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    store = Store(f"memory://{uuid.uuid4()}", retry=Retry(attempts=4, first_s=1.0, sleep=waits.append))
    store.put("head", b"x")
    opened, calls = store._fs.open, [0]

    def flaky(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] < 4:
            raise ConnectionError("reset")
        return opened(*args, **kwargs)

    monkeypatch.setattr(store, "_fs", type("Fs", (), {"open": staticmethod(flaky)})())
    assert store.get("head", 10) == b"x"
    assert len(waits) == 3 == store.metrics.retries and 0.5 <= waits[0] <= 1 and 2 <= waits[2] <= 4
    calls[0] = -9
    with pytest.raises(ConnectionError):
        store.get("head", 10)


def test_names_stay_inside_the_store() -> None:
    for name in ("../x", "a//b", "/etc/passwd", "a/../../b", ".hidden"):
        with pytest.raises(ValueError, match="not the name"):
            memory().get(name, 10)


def test_a_web_server_can_be_followed(tmp_path: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            return

    run, folder = states(4), Store(str(tmp_path), retry=QUICK)
    publisher = Publisher(folder, anchor_every=30)
    publisher.publish(run[0])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        web = Store(f"http://127.0.0.1:{server.server_address[1]}", retry=QUICK)
        subscriber = Subscriber(web)
        subscriber.poll()
        for state in run[1:]:
            publisher.publish(state)
            subscriber.poll()
            assert same(subscriber, state)
        late = Subscriber(web)
        late.poll()
        assert same(late, run[3])
        (tmp_path / "head").unlink()
        headless = Subscriber(web)
        headless.poll()
        assert same(headless, run[3])
        with pytest.raises(OSError, match="not written to"):
            web.put("head", b"")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
