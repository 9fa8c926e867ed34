"""The network of a chosen speed: its rate holds for senders and receivers, and it leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from labs import shaped_link as module
from labs.shaped_link import INTERFACE, LinkError, shaped_link, why_not

RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
ends = [server.accept()[0] for _ in range(int(sys.argv[1]))]
begin, got = time.monotonic(), 0
for end in ends:
    while data := end.recv(1 << 20):
        got += len(data)
print(got, begin, time.monotonic())
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[2], 5000)) as s:
    s.sendall(bytes(int(sys.argv[1])))
"""
HELD = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that put the tests into the background ignores it
from labs.shaped_link import shaped_link
with shaped_link(2, megabits_per_s=10) as link:
    print(*(host.pid for host in link.hosts), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def allowed():
    if reason := why_not():
        pytest.skip(reason)


def _seconds(senders, receivers, count):
    """Seconds until each of ``receivers`` has ``count`` bytes from each of ``senders``."""
    listen = [sys.executable, "-c", RECEIVE, str(len(senders))]
    servers = [subprocess.Popen(host.command(listen), stdout=subprocess.PIPE, text=True) for host in receivers]
    assert [server.stdout.readline() for server in servers] == ["up\n"] * len(servers)
    send = [sys.executable, "-c", SEND, str(count)]
    clients = [subprocess.Popen(a.command([*send, b.address])) for a in senders for b in receivers]
    assert not any(client.wait(30) for client in clients)
    found = [server.communicate(timeout=30)[0].split() for server in servers]
    assert all(int(got) == count * len(senders) for got, _, _ in found)
    return max(float(end) for _, _, end in found) - min(float(begin) for _, begin, _ in found)


def test_no_host_sends_or_receives_faster_than_its_rate(allowed):
    count, rate = 10**6, 16.0
    least = 0.8 * 8 * (count - 128 * 1024) / (rate * 1e6)  # a burst of 128 KiB is free
    with shaped_link(3, megabits_per_s=rate) as link:
        one, two, three = link.hosts
        assert link.megabits_per_s == rate
        assert _seconds([one], [two, three], count // 2) > least
        assert _seconds([one, two], [three], count // 2) > least


def test_a_thread_enters_and_the_rest_of_the_process_stays(allowed):
    def devices():
        return Path("/proc/thread-self/net/dev").read_text()

    with shaped_link(2, megabits_per_s=10) as link:
        seen = []
        thread = threading.Thread(target=lambda: (link.hosts[1].enter(), seen.append(devices())))
        thread.start()
        thread.join()
        assert INTERFACE in seen[0] and INTERFACE not in devices()
    with pytest.raises(LinkError, match="context has ended"):
        link.hosts[1].enter()


def _gone(pids):
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}/ns/net") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_nothing_is_left_behind(allowed):
    with pytest.raises(ZeroDivisionError), shaped_link(2, megabits_per_s=10) as link:
        raise ZeroDivisionError
    assert _gone(host.pid for host in link.hosts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_by_a_signal(allowed, number):
    root = Path(module.__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as held:
        pids = held.stdout.readline().split()
        assert len(pids) == 2
        held.send_signal(number)
        held.communicate(timeout=20)
    assert held.returncode != 0 and _gone(pids)


def test_it_says_why_not(monkeypatch):
    with pytest.raises(ValueError, match="1 hosts at 10 Mbit/s"), shaped_link(1, megabits_per_s=10):
        pass
    with pytest.raises(ValueError, match="at 0 Mbit/s"), shaped_link(2, megabits_per_s=0):
        pass
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LinkError, match="needs tc, which"), shaped_link(2, megabits_per_s=10):
        pass
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "a shaped link needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "_tried", lambda command: "Operation not permitted\nmore")
    assert why_not() == "this kernel or container allows no shaped link: Operation not permitted"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in why_not()
