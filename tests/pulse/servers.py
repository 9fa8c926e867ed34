"""Real servers for tests: a private nginx on a free port, and moto's S3."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
NO_NGINX = "nginx is not installed (Debian/Ubuntu: apt install nginx-light)"
CONFIG = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
{user}
events {{ worker_connections 64; }}
http {{
  log_format requests '$request_method $uri $status $body_bytes_sent range=$http_range control=$http_cache_control '
                      'cache=$upstream_cache_status';
  access_log {folder}/access.log requests;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  proxy_cache_path {folder}/cache keys_zone=all:1m;
  types {{ }} default_type application/octet-stream; sendfile on;
  server {{
    listen 127.0.0.1:{port};
    location / {{ root {root}; {rate} }}
    location /objects/ {{ root {root}; {rate} add_header Cache-Control "public, max-age=31536000, immutable"; }}
    location /closed/ {{ return 403; }}
  }}
  server {{
    listen 127.0.0.1:{cached};
    location / {{
      proxy_pass http://127.0.0.1:{port}; proxy_cache all; proxy_cache_valid 200 404 1h;
      proxy_cache_bypass $http_cache_control; proxy_ignore_headers Cache-Control Expires;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Nginx:
    """One nginx that serves ``root`` at ``url``, and through a cache of its own at ``cached_url``."""

    def __init__(self, root: Path, folder: Path, rate: str = "") -> None:
        self.root, self.folder, self.rate = root, folder, rate
        self.port, self.cached_port = free_port(), free_port()
        self.url, self.cached_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.cached_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert NGINX is not None
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "nginx.conf"
        values = {"root": self.root, "folder": self.folder, "port": self.port, "cached": self.cached_port}
        user = "user root;" if Path("/root").exists() and Path.home() == Path("/root") else ""
        config.write_text(CONFIG.format(**values, user=user, rate=self.rate))
        self._process = subprocess.Popen(
            [NGINX, "-c", str(config), "-p", str(self.folder), "-e", str(self.folder / "error.log")],
            stderr=subprocess.DEVNULL,
        )
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.cached_port), 1):
                return
            assert self._process.poll() is None, (self.folder / "error.log").read_text()
            time.sleep(0.02)
        raise AssertionError("nginx did not come up")

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)

    def requests(self) -> list[str]:
        return (self.folder / "access.log").read_text().splitlines()


@contextlib.contextmanager
def nginx(root: Path, folder: Path, rate: str = "") -> Iterator[Nginx]:
    if NGINX is None:
        pytest.skip(NO_NGINX)
    server = Nginx(root, folder, rate)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """Port of a fresh S3 in this process, with one bucket ``weights``."""
    import logging

    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    try:
        s3fs.S3FileSystem(**s3_options(port)).mkdir("weights")
        yield port
    finally:
        server.stop()


def s3_options(port: int) -> dict[str, object]:
    """Options of a store in this S3; its client library itself does not try again."""
    return {
        "key": "nobody",
        "secret": "nothing",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 5},
    }
