"""`make serve`: this machine alone, one sentence where it cannot, a quiet end."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.serve_book import HOST, serve

ROOT = Path(__file__).resolve().parents[2]
# A shell that started the tests in the background has switched Ctrl-C off for everything below it.
RUN = """
import signal, sys
from pathlib import Path
from tools.serve_book import serve
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(serve(Path(sys.argv[1]), 0))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("<p>the book</p>")
    return tmp_path


@pytest.fixture
def server(site: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", RUN, str(site)], cwd=ROOT, env=environment, **pipes)
    assert process.stdout is not None
    yield process, process.stdout.readline().split()[1]
    process.kill()
    process.communicate()


def test_a_page_is_served_and_ctrl_c_ends_it_quietly(server) -> None:
    process, address = server
    assert urllib.request.urlopen(address, timeout=10).read() == b"<p>the book</p>"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.split(), err) == (0, ["serve:", "ended"], "")


def test_a_browser_that_leaves_early_is_no_error(site: Path, server) -> None:
    (site / "large.bin").write_bytes(bytes(20_000_000))
    process, address = server
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as browser:
        browser.sendall(b"GET /large.bin HTTP/1.1\r\nHost: book\r\n\r\n")
        assert browser.recv(15) == b"HTTP/1.0 200 OK"
    assert urllib.request.urlopen(address, timeout=10).status == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == ""


def test_only_this_machine_is_answered(server) -> None:
    _, address = server
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    assert host == HOST == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5)  # a server on 0.0.0.0 would answer here too


def test_a_port_in_use_gives_one_sentence(site: Path, capsys) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(site, port) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"port {port} is in use" in said and f"PORT={port + 1}" in said


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_is_none_gives_one_sentence(port: int, site: Path, capsys) -> None:
    assert serve(site, port) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"port {port} cannot be opened" in said


def test_without_a_book_it_says_how_to_build_one(tmp_path: Path, capsys) -> None:
    assert serve(tmp_path, 0) == 1
    assert "make book" in capsys.readouterr().err
