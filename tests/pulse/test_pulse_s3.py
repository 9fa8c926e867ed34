"""Publishing to and following from S3, spoken by moto's server: lists, deletes, take-overs, failures on the way."""

import uuid
from collections.abc import Iterator

import fsspec
import pytest
import torch

from dist_lib.pulse.errors import CorruptPatchError, MissingPackageError
from dist_lib.pulse.manifest import load_key, marker_name, public_bytes
from dist_lib.pulse.publisher import Publisher, Retention
from dist_lib.pulse.state import digest_state
from dist_lib.pulse.store import MissingObjectError, ObjectExistsError, Retry, Store
from dist_lib.pulse.subscriber import Subscriber
from labs.pulse.proxy import Path as Way
from labs.pulse.proxy import Proxy
from tests.pulse import servers

ONCE = Retry(attempts=1)
KEY = load_key(bytes(range(32)))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with servers.moto() as running:
        yield running


@pytest.fixture
def place() -> str:
    return f"s3://weights/{uuid.uuid4()}"


def bucket(place: str, port: int, retry: Retry = ONCE) -> Store:
    return Store(place, servers.s3_options(port), retry)


def states(count: int, cells: int = 2000) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    words = (torch.randn(cells, generator=generator) * 0.02).bfloat16().view(torch.int16)
    out = [{"w": words.view(torch.bfloat16), "b": torch.zeros(3)}]
    for step in range(1, count):
        words = words.clone()
        words[step::41] += 1
        out.append({"w": words.view(torch.bfloat16), "b": torch.full((3,), float(step))})
    return out


def follows(subscriber: Subscriber, state: dict[str, torch.Tensor]) -> bool:
    return subscriber.state is not None and digest_state(subscriber.state).whole == digest_state(state).whole


def test_several_receivers_follow_through_a_bucket(place: str, port: int) -> None:
    run = states(5)
    publisher = Publisher(bucket(place, port), anchor_every=3, key=KEY, workers=1)
    fast, slow = (Subscriber(bucket(place, port), public_key=public_bytes(KEY), workers=1) for _ in range(2))
    assert fast.poll() is None
    for version, state in enumerate(run):
        publisher.publish(state)
        update = fast.poll()
        assert update is not None and update.version == version and follows(fast, state)
        if version == 1:
            slow.poll()
    update = slow.poll()
    assert update is not None and update.steps == tuple(("patch", v) for v in range(2, 5)) and follows(slow, run[-1])
    late = Subscriber(bucket(place, port), public_key=public_bytes(KEY), workers=1)
    update = late.poll()
    assert update is not None and update.steps == (("anchor", 3), ("patch", 4)) and late.digest == fast.digest


def test_a_publisher_takes_over_and_old_versions_go(place: str, port: int) -> None:
    run, retention = states(5), Retention(anchors=2, min_age_s=0.0)
    for state in run:  # each version by a new publisher, as if the one before had crashed
        publisher = Publisher(bucket(place, port), anchor_every=2, retention=retention, workers=1)
        publisher.publish(state)
        late = Subscriber(bucket(place, port), workers=1)
        late.poll()
        assert late.version == publisher.version and follows(late, state)
    store = bucket(place, port)
    anchors = [marker_name(v, "anchor") for v in (2, 4)]
    assert sorted(store.names("versions")) == sorted([marker_name(v, "patch") for v in (2, 3, 4)] + anchors)
    assert len(store.names("objects")) == 10  # a payload and a manifest each


def test_what_the_bucket_says_is_understood(place: str, port: int) -> None:
    store = bucket(place, port)
    for attempt in (lambda: store.get("head", 10), lambda: store.get_content("0" * 64, 10)):
        with pytest.raises(MissingObjectError):
            attempt()
    assert store.size("head") is None and store.names("versions") == {}
    store.delete("head")
    assert store.metrics.retries == 0
    store.put_marker("versions/x", b"one")
    store.put_marker("versions/x", b"one")
    with pytest.raises(ObjectExistsError):
        store.put_marker("versions/x", b"two")
    digest = store.put_content(b"payload")
    assert store.get_content(digest, 7) == b"payload" and store.size(f"objects/{digest[:2]}/{digest}") == 7
    store.put(f"objects/{digest[:2]}/{digest}", b"daMaged")
    with pytest.raises(CorruptPatchError):
        store.get_content(digest, 7)
    store.put("head", b"")
    assert store.get("head", 10) == b"" and list(store.names("objects")) == [f"objects/{digest[:2]}/{digest}"]


def test_a_bucket_out_of_reach_is_waited_for(place: str, port: int) -> None:
    waits: list[float] = []
    run = states(3)
    with Proxy(port) as proxy:
        direct = Publisher(bucket(place, port), workers=1)
        direct.publish(run[0])
        subscriber = Subscriber(bucket(place, proxy.port), workers=1)
        subscriber.poll()
        direct.publish(run[1])
        proxy.down()
        with pytest.raises(OSError, match=r"size of|get "):
            subscriber.poll()
        assert subscriber.version == 0 and follows(subscriber, run[0])
        through = Publisher(bucket(place, proxy.port), workers=1)
        with pytest.raises(OSError, match="list"):
            through.publish(run[2])
        proxy.up()
        assert subscriber.poll() is not None and follows(subscriber, run[1])

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                proxy.up()

        subscriber.store.retry = Retry(attempts=6, first_s=0.5, sleep=wait)
        through.publish(run[2])  # found out by itself what is there
        proxy.down()
        update = subscriber.poll()
        assert update is not None and update.version == 2 and follows(subscriber, run[2])
        assert len(waits) == 3 == subscriber.store.metrics.retries and waits[2] > waits[0]


def test_cuts_in_the_middle_of_objects(place: str, port: int) -> None:
    """Connections are cut after some thousand bytes, and at once while something is written; no bit changes."""
    state, uncut = states(1, 100_000)[0], 1 << 30
    patient = Retry(attempts=8, sleep=lambda s: None)
    with Proxy(port, Way(cut_after=(0, 0, uncut, 0))) as proxy:
        publisher = Publisher(bucket(place, proxy.port, patient), workers=1)
        publisher.publish(state)
        assert publisher.store.metrics.retries >= 1
    subscriber = Subscriber(bucket(place, port), workers=1)
    subscriber.poll()
    assert follows(subscriber, state)
    sizes = {name: subscriber.store.size(name) or 0 for name in subscriber.store.names("objects")}
    name = max(sizes, key=lambda n: sizes[n])
    data = subscriber.store.get(name, sizes[name])
    assert len(data) > 100_000
    with Proxy(port, Way(cut_after=(uncut, 40_000, uncut, 90_000, 10))) as proxy:
        store = bucket(place, proxy.port, patient)
        assert store.get(name, len(data)) == data
        assert store.metrics.retries >= 2 and proxy.sent > len(data) + 100_000


def test_without_its_client_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingPackageError, match=r"dist-lib\[s3\]"):
        Store("s3://weights/run")
