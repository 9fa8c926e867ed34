"""A network of a chosen speed on one machine: hosts that are Linux network namespaces, joined by shaped cables.

>>> with shaped_link(2, megabits_per_s=1000) as link:
...     subprocess.run(link.hosts[1].command(["python", "receive.py"]))

Every host has one interface, which sends and receives at the given rate, at a switch that is faster: what one host
sends to two others shares its own rate, what two send to one shares that one's. Only the rate is emulated; delay and
loss are not. The namespaces have no names and hang on child processes that wait for the end of their input, so the
kernel takes everything down when the context ends or this process does, by whatever signal.

It needs root on Linux, and ``ip``, ``tc``, ``unshare`` and ``nsenter``; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INTERFACE = "link0"
"""Name of every host's interface, for ``GLOO_SOCKET_IFNAME``."""
MOST_HOSTS = 200
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


class LinkError(RuntimeError):
    """The network could not be made, or a process could not enter it; the message says why."""


@dataclass(frozen=True)
class Host:
    """One host of a shaped link; may be sent to another process.

    Attributes:
        index: its number.
        pid: of the process that keeps its namespace.
        address: its IPv4 address.
    """

    index: int
    pid: int
    address: str

    @property
    def path(self) -> str:
        """The file that stands for the namespace."""
        return f"/proc/{self.pid}/ns/net"

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` with what makes it run on this host in front."""
        return ["nsenter", f"--net={self.path}", "--", *command]

    def enter(self) -> None:
        """Move the calling thread, and threads that it starts from now on, to this host. Sockets it has stay behind.

        Raises:
            LinkError: the link is down, or this process may not.
        """
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(f"host {self.index} is gone ({error.strerror}): the link's context has ended") from error
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _NEW_NETWORK):
                raise LinkError(f"cannot enter host {self.index}: {os.strerror(ctypes.get_errno())}; this needs root")
        finally:
            os.close(handle)


@dataclass(frozen=True)
class ShapedLink:
    """Hosts that reach one another at ``megabits_per_s`` (millions of bits a second, headers included)."""

    hosts: tuple[Host, ...]
    megabits_per_s: float


def _tried(command: Sequence[str]) -> str:
    """Run a command; return what went wrong, or nothing."""
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=20, check=False)
    return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""


def why_not() -> str:
    """Why no link can be made here; empty if one can. Makes a cable in a namespace of its own to find out."""
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a shaped link needs {', '.join(missing)}, which are not installed (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "a shaped link needs root"
    commands = "ip link add cable0 type veth peer name cable1; ip link add switch type bridge"
    shape = "tc qdisc add dev cable0 root tbf rate 100mbit burst 256kb latency 50ms"
    wrong = _tried(["unshare", "--net", "sh", "-ec", f"{commands}; {shape}"])
    return f"this kernel or container allows no shaped link: {wrong.splitlines()[0]}" if wrong else ""


def _run(command: str) -> None:
    wrong = _tried(command.split())
    if wrong:
        raise LinkError(f"{command}: {wrong}")


def _keeper(stack: contextlib.ExitStack) -> int:
    """A process with a network namespace of its own that ends when its input does; returns its number."""
    script = "ip link set lo up && echo ready && exec cat"
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the context, which ends it
    )
    stack.callback(_end, process)
    assert process.stdout is not None and process.stderr is not None  # pipes, for the type checker
    if process.stdout.readline() != "ready\n":
        raise LinkError(f"no network namespace: {process.stderr.read().strip() or 'unshare failed'}")
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shape(prefix: str, device: str, megabits_per_s: float) -> None:
    """Limit what leaves ``device``: 4 ms may go at once, a full packet at least; 100 ms may wait."""
    rate = round(megabits_per_s * 1e6)
    burst = max(rate * 4 // 8000, 128 * 1024)
    _run(f"{prefix} tc qdisc add dev {device} root tbf rate {rate}bit burst {burst}b latency 100ms")


@contextlib.contextmanager
def shaped_link(hosts: int = 2, *, megabits_per_s: float) -> Iterator[ShapedLink]:
    """A network for the time of the context.

    Args:
        hosts: 2 to 200.
        megabits_per_s: rate of every host's interface, each way, from 0.1 to 100 000.

    Yields:
        The link. A process that is still on a host when the context ends has lost its network then.

    Raises:
        ValueError: numbers out of range.
        LinkError: it cannot be made here; see :func:`why_not`.
    """
    if not 2 <= hosts <= MOST_HOSTS or not 0.1 <= megabits_per_s <= 100_000:
        raise ValueError(f"{hosts} hosts at {megabits_per_s} Mbit/s: allowed are 2 to {MOST_HOSTS}, 0.1 to 100000")
    reason = why_not()
    if reason:
        raise LinkError(reason)
    with contextlib.ExitStack() as stack:
        switch = _keeper(stack)
        inside = f"nsenter --net=/proc/{switch}/ns/net --"
        _run(f"{inside} ip link add switch type bridge")
        _run(f"{inside} ip link set switch up")
        found = []
        for index in range(hosts):
            host = Host(index, _keeper(stack), f"10.77.0.{index + 1}")
            there = f"nsenter --net={host.path} --"
            _run(f"{inside} ip link add port{index} type veth peer name {INTERFACE} netns {host.pid}")
            _run(f"{inside} ip link set port{index} master switch up")
            _run(f"{there} ip address add {host.address}/24 dev {INTERFACE}")
            _run(f"{there} ip link set {INTERFACE} up")
            _shape(there, INTERFACE, megabits_per_s)
            _shape(inside, f"port{index}", megabits_per_s)
            found.append(host)
        yield ShapedLink(tuple(found), megabits_per_s)
