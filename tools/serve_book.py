"""Serve the built book on this machine alone until Ctrl-C."""

import argparse
import errno
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HTML = Path(__file__).resolve().parent.parent / "_build" / "html"
HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """One thread a request, so that a browser's idle connection blocks nobody."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left before its answer was complete."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(SimpleHTTPRequestHandler):
    """Files of the book; only what could not be answered is written down."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing of a request that was answered."""


def serve(html: Path, port: int) -> int:
    """Serve a folder; returns the exit status."""
    if not (html / "index.html").exists():
        print("serve: there is no built book; run `make book` first.", file=sys.stderr)
        return 1
    try:
        server = Server((HOST, port), partial(Handler, directory=str(html)))
    except (OSError, OverflowError) as error:
        busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = f"port {port} is in use" if busy else f"port {port} cannot be opened ({error})"
        print(f"serve: {reason}; choose another one: make serve PORT={port + 1 if busy else 8001}", file=sys.stderr)
        return 1
    with server:
        print(f"Open http://{HOST}:{server.server_port}/ (end with Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nserve: ended")
    return 0


def main() -> int:
    """Read the port and serve; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", nargs="?", type=int, default=8000, help="default 8000")
    return serve(HTML, parser.parse_args().port)


if __name__ == "__main__":
    raise SystemExit(main())
