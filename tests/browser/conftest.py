"""One browser and one web server for each test process."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.chromium import ARGUMENTS, find_chromium

HTML = Path(__file__).resolve().parents[2] / "_build" / "html"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def serve(folder: Path) -> tuple[Server, str]:
    server = Server(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}/"


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    if not (HTML / "index.html").exists():
        pytest.fail("the book is not built; run `make book` first")
    server, base = serve(HTML)
    yield base
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH (Debian/Ubuntu: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def contexts(browser):
    made = {scheme: browser.new_context(color_scheme=scheme) for scheme in ("light", "dark")}
    yield made
    for context in made.values():
        context.close()


@pytest.fixture
def open_page(contexts):
    pages = []

    def make(scheme: str = "light"):
        pages.append(contexts[scheme].new_page())
        return pages[-1]

    yield make
    for page in pages:
        page.close()
