"""Following a run behind a real nginx: caches on the way, broken transfers, a server that is killed and comes back."""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dist_lib.pulse.errors import CorruptPatchError
from dist_lib.pulse.publisher import Publisher
from dist_lib.pulse.state import digest_state
from dist_lib.pulse.store import MissingObjectError, Retry, Store
from dist_lib.pulse.subscriber import Subscriber
from dist_lib.pulse.web import RefusedError
from labs.pulse.proxy import Path as Way
from labs.pulse.proxy import Proxy
from tests.pulse import servers

PATIENT = Retry(attempts=12, first_s=0.02, most_s=0.3)
ONCE = Retry(attempts=1)


def states(count: int, cells: int = 3000) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(-(2**15), 2**15, (cells,), generator=generator, dtype=torch.int16)
    out = [{"w": words.view(torch.bfloat16)}]
    for step in range(1, count):
        words = words.clone()
        words[step :: max(1, cells // 50)] ^= 1
        out.append({"w": words.view(torch.bfloat16)})
    return out


def follows(subscriber: Subscriber, state: dict[str, torch.Tensor]) -> bool:
    return subscriber.state is not None and digest_state(subscriber.state).whole == digest_state(state).whole


def publisher(root: Path) -> Publisher:
    return Publisher(Store(str(root)), allow_nonfinite=True, workers=1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[servers.Nginx]:
    (tmp_path / "run").mkdir()
    with servers.nginx(tmp_path / "run", tmp_path / "nginx") as running:
        yield running


def test_versions_arrive_and_only_contents_may_be_cached(server: servers.Nginx) -> None:
    source, run = publisher(server.root), states(4)
    subscriber = Subscriber(Store(server.url, retry=ONCE))
    assert subscriber.poll() is None  # nothing is there yet: 404 for the hint and for every marker
    for version, state in enumerate(run):
        source.publish(state)
        update = subscriber.poll()
        assert update is not None and update.version == version and follows(subscriber, state)
        assert subscriber.poll() is None
    assert subscriber.store.metrics.retries == 0
    log = server.requests()
    assert all(("control=-" in line) == (" /objects/" in line) for line in log), log
    assert sum(line.startswith("HEAD /versions/") and " 404 " in line for line in log) >= 4
    with urllib.request.urlopen(f"{server.url}/{next(iter(Store(str(server.root)).names('objects')))}") as answer:
        assert "immutable" in answer.headers["Cache-Control"]


def test_a_cache_neither_hides_a_new_version_nor_repeats_a_damaged_object(server: servers.Nginx) -> None:
    source, run = publisher(server.root), states(3)
    source.publish(run[0])
    first, second = (Subscriber(Store(server.cached_url, retry=ONCE)) for _ in range(2))
    for subscriber in (first, second):
        subscriber.poll()
        assert follows(subscriber, run[0]) and subscriber.poll() is None
    assert any(" /objects/" in line and "cache=HIT" in line for line in server.requests())
    with pytest.raises(urllib.error.HTTPError):  # a careless client leaves this answer in the cache
        urllib.request.urlopen(f"{server.cached_url}/versions/00000000000000000001.patch")
    with urllib.request.urlopen(f"{server.cached_url}/head") as answer:
        assert answer.status == 200
    before = set(Store(str(server.root)).names("objects"))
    source.publish(run[1])
    added = [server.root / name for name in set(Store(str(server.root)).names("objects")) - before]
    good = [path.read_bytes() for path in added]
    for path in added:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        urllib.request.urlopen(f"{server.cached_url}/{path.relative_to(server.root)}").read()
    for path, data in zip(added, good, strict=True):
        path.write_bytes(data)
    update = first.poll()
    assert update is not None and update.steps == (("patch", 1),) and follows(first, run[1])


@pytest.mark.parametrize("resumable", [True, False])
def test_a_broken_transfer_goes_on_where_it_stopped(server: servers.Nginx, resumable: bool) -> None:
    data = bytes(states(1, 300_000)[0]["w"].view(torch.uint8).tolist())
    folder = Store(str(server.root))
    name = f"objects/{folder.put_content(data)[:2]}/"
    name = next(iter(folder.names("objects"))) if resumable else "versions/large"
    folder.put(name, data)
    with Proxy(server.port, Way(cut_after=(100_000, 0, 250_000))) as proxy:
        web = Store(f"http://127.0.0.1:{proxy.port}", retry=Retry(attempts=9, sleep=lambda s: None))
        assert web.get(name, len(data)) == data
        assert web.metrics.retries == 3 and proxy.connections == 4
        assert web.metrics.resumes == (2 if resumable else 0)
        assert (proxy.sent < 1.1 * len(data)) == resumable
    ranges = [line for line in server.requests() if " 206 " in line]
    assert len(ranges) >= 2 * resumable and all("range=bytes=" in line for line in ranges)
    with Proxy(server.port, Way(cut_after=(100_000,) * 3)) as proxy:
        web = Store(f"http://127.0.0.1:{proxy.port}", retry=Retry(attempts=2, sleep=lambda s: None))
        with pytest.raises(OSError, match=r"transfer ended|reset"):
            web.get(name, len(data))


def test_a_replaced_object_is_not_glued_to_the_old_one(server: servers.Nginx) -> None:
    """The second half is of other bytes under another tag, so the transfer starts over, and the digest decides."""
    data = bytes(200_000)
    folder = Store(str(server.root))
    digest = folder.put_content(data)
    path = server.root / "objects" / digest[:2] / digest

    def replace(_: float) -> None:
        path.write_bytes(b"x" * 200_001)

    with Proxy(server.port, Way(cut_after=(100_000,))) as proxy:
        web = Store(f"http://127.0.0.1:{proxy.port}", retry=Retry(attempts=3, sleep=replace))
        assert web.get(f"objects/{digest[:2]}/{digest}", 300_000) == b"x" * 200_001
        with pytest.raises(CorruptPatchError):
            web.get_content(digest, len(data))


def test_a_server_killed_in_the_middle_of_a_payload(tmp_path: Path) -> None:
    """The transfer takes about a second; the server dies during it and comes back at the same address."""
    root, run = tmp_path / "run", states(2, 200_000)
    source = publisher(root)
    source.publish(run[0])
    with servers.nginx(root, tmp_path / "nginx", rate="limit_rate 200k;") as server:
        subscriber = Subscriber(Store(server.url, retry=PATIENT))
        updates: list[object] = []
        thread = threading.Thread(target=lambda: updates.append(subscriber.poll()), daemon=True)
        thread.start()
        while subscriber.store.metrics.gets < 4 and thread.is_alive():  # hints, marker, manifest; then the payload
            time.sleep(0.002)
        server.kill()
        time.sleep(0.1)
        server.start()
        thread.join(60)
        assert len(updates) == 1 and updates[0] is not None and follows(subscriber, run[0])
        assert subscriber.store.metrics.retries >= 1


def test_following_outlives_the_server(server: servers.Nginx) -> None:
    source, run = publisher(server.root), states(3)
    source.publish(run[0])
    subscriber = Subscriber(Store(server.url, retry=Retry(attempts=2, first_s=0.01)))
    updates = subscriber.follow(interval_s=0.02, until=2)
    assert next(updates).version == 0
    server.kill()
    source.publish(run[1])
    with pytest.raises(OSError, match="refused"):
        subscriber.poll()
    assert subscriber.version == 0 and follows(subscriber, run[0])
    back = threading.Timer(0.3, lambda: (server.start(), source.publish(run[2])))
    back.start()
    seen = [update.version for update in updates]
    back.join()
    assert seen[-1] == 2 and follows(subscriber, run[2]) and subscriber.store.metrics.retries > 0


def test_waits_grow_and_a_refusal_is_not_asked_again(server: servers.Nginx) -> None:
    waits: list[float] = []
    web = Store(server.url, retry=Retry(attempts=5, first_s=1.0, most_s=3.0, sleep=waits.append))
    with pytest.raises(RefusedError, match="403"):
        web.get("closed/x", 10)
    assert waits == [] and web.size("nothing") is None
    with pytest.raises(MissingObjectError):
        web.get("nothing", 10)
    assert waits == []
    server.kill()
    with pytest.raises(OSError, match="refused"):
        web.size("nothing")
    bounds = [(0.5, 1.0), (1.0, 2.0), (1.5, 3.0), (1.5, 3.0)]
    assert len(waits) == 4 and all(low <= wait <= high for wait, (low, high) in zip(waits, bounds, strict=True))


@pytest.mark.parametrize("way", [Way(delay_s=0.003), Way(loss=0.02, timeout_s=0.01), Way(0.002, 0.01, 0.01)])
def test_delay_and_loss_change_no_bit(server: servers.Nginx, way: Way) -> None:
    source, run = publisher(server.root), states(3, 100_000)
    with Proxy(server.port, way) as proxy:
        subscriber = Subscriber(Store(f"http://127.0.0.1:{proxy.port}", retry=ONCE))
        for state in run:
            source.publish(state)
            subscriber.poll()
            assert follows(subscriber, state)
        assert proxy.sent > 200_000 and (proxy.lost > 0) == (way.loss > 0)


def test_a_proxy_refuses_nonsense() -> None:
    for bad in ({"delay_s": -1.0}, {"loss": 1.0}, {"cut_after": (-1,)}):
        with pytest.raises(ValueError, match="at least 0"):
            Way(**bad)  # type: ignore[arg-type]
