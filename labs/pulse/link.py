"""Measure syncs over a narrow link: a publisher serves its store by HTTP, subscribers on other hosts follow it.

Hosts are network namespaces behind shaped cables (:mod:`labs.shaped_link`, which needs root); everything else is as in
real use: payloads, manifest and marker go to a folder, a web server hands it out, a receiver looks for the next version
every few milliseconds, fetches, verifies and swaps. Patches are compared with full copies of the same weights, and both
with the closed form of :mod:`dist_lib.pulse.timing`, whose costs besides the transfer are those of the same sync
without a link. Computing is waiting. Delay and loss are added by :mod:`labs.pulse.proxy`, without root.

    python -m labs.pulse.link --record
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_lib import results
from dist_lib.pulse import MissingObjectError, Publisher, Retry, Store, Subscriber, digest_state
from dist_lib.pulse.state import as_bytes, find_ties, from_words, spec_of
from dist_lib.pulse.timing import SyncCost, sync_seconds, utilisation
from labs.pulse.proxy import Path as Way
from labs.pulse.proxy import Proxy
from labs.shaped_link import Host, shaped_link, why_not

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "data" / "results" / "pulse-link.json"
SHARE = 1448 / 1514
"""Payload of a full Ethernet frame, of what a shaped link counts: 66 bytes are headers of Ethernet, IP and TCP."""
LOOK_S = 0.005
PATIENT = Retry(attempts=40, first_s=0.05, most_s=0.5)
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is synced.

    Attributes:
        cells: bfloat16 weights of a synthetic state; 0 for the recorded stream of SmolLM2.
        lr: of the synthetic updates, and of the recorded stream.
        codec: of patches.
        versions: syncs of patches that are counted; one more goes before them.
        compute_s: pause before each sync, which stands for computing.
    """

    cells: int = 0
    lr: float = 1e-6
    codec: str = "small"
    versions: int = 3
    compute_s: float = 2.0


def states(work: Work) -> Iterator[State]:
    """Version after version of what is synced, without end where it is synthetic."""
    if not work.cells:
        from labs.pulse.stream import recorded_stream, stream_folder  # brings models and tasks along

        yield from recorded_stream(stream_folder(work.lr, "fp32"))
        return
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(work.cells, generator=generator) * 0.02
    while True:
        w = master.bfloat16()
        yield {"w": w.view(-1, 8) if w.numel() % 8 == 0 else w, "norm": torch.ones(8)}
        master += 0.4 * work.lr * torch.randn(work.cells, generator=generator)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def web_server(folder: Path, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve a folder by HTTP from this process; yields the port."""
    server = http.server.ThreadingHTTPServer((address, 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _write_full(store: Store, version: int, state: State) -> int:
    """A version as a full copy: the bytes of all tensors as they are, then a note that names them."""
    ties = find_ties(state)
    data = b"".join(as_bytes(state[name]).tobytes() for name in sorted(state) if name not in ties)
    note = {"object": store.put_content(data), "size": len(data), "digest": digest_state(state).hex}
    store.put(f"full/{version}", json.dumps(note).encode())
    return len(data)


def _read_full(store: Store, version: int, like: State) -> State:
    """The version of :func:`_write_full`, checked; waits for it."""
    while True:
        with contextlib.suppress(MissingObjectError):
            note = json.loads(store.get(f"full/{version}", 4096))
            break
        time.sleep(LOOK_S)
    data, at, found = bytearray(store.get_content(note["object"], note["size"])), 0, dict[str, Tensor]()
    ties = find_ties(like)
    for name in sorted(like):
        if name not in ties:
            spec = spec_of(name, like[name])
            flat = torch.frombuffer(data, dtype=torch.uint8, count=spec.nbytes, offset=at) if spec.nbytes else None
            found[name] = like[name] if flat is None else from_words(flat.numpy(), spec)
            at += spec.nbytes
    state = {name: found[ties.get(name, name)] for name in like}
    if digest_state(state).hex != note["digest"]:
        raise RuntimeError(f"full copy {version} arrived with another digest")
    return state


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def publish_worker(folder: Path, address: str, work: Work) -> None:
    """The publisher's process: serve the folder and publish what the lines of the input ask for.

    ``patch`` publishes the next version, ``full`` writes the newest one as a full copy.
    """
    torch.set_num_threads(1)
    store, source = Store(str(folder)), states(work)
    publisher = Publisher(store, codec=work.codec, anchor_every=10**6)
    state, version, copies = next(source), 0, 0
    publisher.publish(state)
    following = next(source, None)
    with web_server(folder, address) as port:
        _say(port=port, digest=digest_state(state).hex, bytes=sum(t.nbytes for t in _owners(state)))
        for line in sys.stdin:
            start = time.monotonic()
            if line.strip() == "patch":
                if following is None:
                    raise RuntimeError("the recorded stream has no more versions; record a longer one")
                done, state = publisher.publish(following), following
                version, sent = done.version, done.patch_bytes
            else:
                sent, copies = _write_full(store, copies, state), copies + 1
            written = time.monotonic()
            _say(version=version, bytes=sent, seconds=written - start, digest=digest_state(state).hex)
            if line.strip() == "patch":
                following = next(source, None)


def _owners(state: State) -> list[Tensor]:
    ties = find_ties(state)
    return [tensor for name, tensor in state.items() if name not in ties]


def follow_worker(folder: Path, url: str) -> None:
    """A subscriber's process: begin with the version in the folder, then go over the link as the input asks."""
    torch.set_num_threads(1)
    subscriber = Subscriber(Store(str(folder)))
    subscriber.poll()
    subscriber.store = store = Store(url, retry=PATIENT)
    copies = 0
    _say(version=subscriber.version, digest=subscriber.digest.hex if subscriber.digest else "")
    for line in sys.stdin:
        before = store.metrics.bytes_in
        if line.strip() == "patch":
            while (update := subscriber.poll()) is None:
                time.sleep(LOOK_S)
            _say(at=time.monotonic(), version=update.version, digest=digest_state(subscriber.state or {}).hex,
                 bytes=store.metrics.bytes_in - before)  # fmt: skip
        else:
            state = _read_full(store, copies, dict(subscriber.state or {}))
            at, copies = time.monotonic(), copies + 1
            _say(
                at=at, version=subscriber.version, digest=digest_state(state).hex, bytes=store.metrics.bytes_in - before
            )


class _Process:
    """A worker with lines of JSON in and out."""

    def __init__(self, host: Host | None, work: Work, *arguments: str) -> None:
        command = [sys.executable, "-m", "labs.pulse.link", "--work", json.dumps(asdict(work)), *arguments]
        self.process = subprocess.Popen(
            host.command(command) if host else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with status {self.process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Syncs:
    """What was measured for one kind of sync.

    Attributes:
        mode: ``"patch"`` or ``"full"``.
        megabits_per_s: rate of every host's interface; None for no link between the processes.
        subscribers: that all fetch from the one publisher.
        nbytes: that one subscriber fetched in a sync, markers included: the median over the syncs.
        seconds: of each sync, from the call that publishes until the slowest subscriber has swapped.
        busy: share of the time that was spent computing, measured.
        equal: whether all subscribers held the publisher's bits after every sync.
    """

    mode: str
    megabits_per_s: float | None
    subscribers: int
    nbytes: int
    seconds: tuple[float, ...]
    busy: float
    equal: bool

    @property
    def median_s(self) -> float:
        """The median sync."""
        return statistics.median(self.seconds)


def _sync(publisher: _Process, subscribers: Sequence[_Process], mode: str, work: Work) -> tuple[float, int, bool]:
    time.sleep(work.compute_s)
    for process in subscribers:
        process.ask(mode)
    start = time.monotonic()
    publisher.ask(mode)
    sent = publisher.answer()
    got = [process.answer() for process in subscribers]
    equal = all(answer["digest"] == sent["digest"] for answer in got)
    return max(answer["at"] for answer in got) - start, max(int(answer["bytes"]) for answer in got), equal


def measure(megabits_per_s: float | None, subscribers: int, work: Work, *, full: int = 1) -> list[Syncs]:
    """Sync ``work.versions`` patches after one to warm up, and the newest version ``full`` times as a full copy.

    Args:
        megabits_per_s: rate of the link; None for none, which needs no root.
        subscribers: at least 1.
        work: what is synced.
        full: how many full copies.

    Raises:
        LinkError: there can be no link here.
        FileNotFoundError: the stream is not recorded.
    """
    found: dict[str, list[tuple[float, int, bool]]] = {"patch": [], "full": []}
    spent = dict.fromkeys(found, 0.0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-link-"))
        hosts: Sequence[Host | None] = [None] * (subscribers + 1)
        if megabits_per_s is not None:
            hosts = stack.enter_context(shaped_link(subscribers + 1, megabits_per_s=megabits_per_s)).hosts
        address = hosts[0].address if hosts[0] else "127.0.0.1"
        publisher = _Process(hosts[0], work, "--publish", folder, "--address", address)
        stack.callback(publisher.end)
        port = publisher.answer()["port"]
        receivers = [_Process(h, work, "--follow", folder, "--address", f"http://{address}:{port}") for h in hosts[1:]]
        for process in receivers:
            stack.callback(process.end)
        for process in receivers:
            process.answer()
        _sync(publisher, receivers, "patch", work)  # compiles, and is not counted
        for mode, times in (("patch", work.versions), ("full", full)):
            start = time.monotonic()
            for _ in range(times):
                found[mode].append(_sync(publisher, receivers, mode, work))
            spent[mode] = time.monotonic() - start
    return [
        Syncs(
            mode,
            megabits_per_s,
            subscribers,
            int(statistics.median(nbytes for _, nbytes, _ in values)),
            tuple(round(seconds, 4) for seconds, _, _ in values),
            work.compute_s * len(values) / spent[mode],
            all(equal for *_, equal in values),
        )
        for mode, values in found.items()
        if values
    ]


def closed_form(syncs: Syncs, unlinked: Syncs) -> float:
    """Seconds of a sync by the closed form: the same sync without a link, and the bytes of all subscribers over it."""
    if syncs.megabits_per_s is None:
        return unlinked.median_s
    rate = syncs.megabits_per_s * 1e6 * SHARE
    return sync_seconds(syncs.nbytes * syncs.subscribers, rate, cost=SyncCost(reload_s=unlinked.median_s))


def over_paths(work: Work, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Sync patches through the proxy: for each way, the seconds of a sync, its connections and lost segments."""
    found = []
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="pulse-path-") as folder, web_server(Path(folder)) as port:
            source, publisher = states(work), Publisher(Store(folder), codec=work.codec, anchor_every=10**6)
            publisher.publish(next(source))
            with Proxy(port, way) as proxy:
                subscriber, seconds, counts = Subscriber(Store(folder)), [], []
                subscriber.poll()
                subscriber.store = Store(f"http://127.0.0.1:{proxy.port}", retry=PATIENT)
                for _ in range(work.versions):
                    state = next(source)
                    publisher.publish(state)
                    before, start = proxy.connections, time.monotonic()
                    update = subscriber.poll()
                    seconds.append(round(time.monotonic() - start, 4))
                    counts.append(proxy.connections - before)
                    if update is None or digest_state(subscriber.state or {}).hex != digest_state(state).hex:
                        raise RuntimeError("a patch that came through the proxy is not what was published")
                row = {"delay_s": way.delay_s, "loss": way.loss, "timeout_s": way.timeout_s, "lost": proxy.lost}
                found.append({**row, "seconds": seconds, "requests": statistics.median(counts)})
    return found


def run(work: Work, rates: Sequence[float], subscribers: Sequence[int]) -> dict[str, Any]:
    """Everything that is recorded, as plain data."""
    rows = []
    for count in subscribers:
        unlinked = {syncs.mode: syncs for syncs in measure(None, count, work, full=2)}
        for rate in (None, *rates):
            for syncs in unlinked.values() if rate is None else measure(rate, count, work):
                predicted = closed_form(syncs, unlinked[syncs.mode])
                shares = {"utilisation": syncs.busy, "closed_form_utilisation": utilisation(work.compute_s, predicted)}
                rows.append({**asdict(syncs), "median_s": syncs.median_s, "closed_form_s": predicted, **shares})
                if not syncs.equal:
                    raise RuntimeError(f"a subscriber holds other bits than were published: {syncs}")
    first = next(states(work))
    return {
        "what": "SmolLM2-135M, dequantised Q4_1, updates of GRPO" if not work.cells else f"{work.cells} normal weights",
        "state_bytes": sum(tensor.nbytes for tensor in _owners(first)),
        "digest": hashlib.sha256(digest_state(first).whole).hexdigest()[:16],
        "work": asdict(work),
        "payload_share": SHARE,
        "hardware": results.hardware(),
        "load": os.getloadavg()[0],
        "syncs": rows,
        "paths": over_paths(work, [Way(), Way(0.01), Way(0.05), Way(0.05, 0.001)]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m labs.pulse.link", description="Measure syncs over narrow links.")
    parser.add_argument("--cells", type=int, default=0, help="synthetic weights instead of the recorded SmolLM2 stream")
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0], help="of links, Mbit/s")
    parser.add_argument("--subscribers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    for name in ("--work", "--publish", "--follow", "--address"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    work = Work(**json.loads(options.work)) if options.work else Work(cells=options.cells)
    if options.publish:
        publish_worker(Path(options.publish), options.address, work)
        return 0
    if options.follow:
        follow_worker(Path(options.follow), options.address)
        return 0
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    found = run(work, options.rates, options.subscribers)
    text = json.dumps(found, indent=1) + "\n"
    if options.record:
        results.write_text(RECORD, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
