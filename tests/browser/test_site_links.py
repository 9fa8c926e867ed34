"""Every internal link and anchor of the built book leads somewhere."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.browser.conftest import HTML

# Anchors that a script makes when the page opens.
SCRIPTED_ANCHORS = {"", "top"}


class Links(HTMLParser):
    """Collects link targets and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        self.targets += [value for key in ("href", "src") if (value := values.get(key))]


@cache
def parsed(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def broken_links(root: Path) -> list[str]:
    """Return each internal link of the site under `root` that leads nowhere."""
    broken = []
    for page in sorted(root.rglob("*.html")):
        if page.relative_to(root).parts[0] == "_static":
            continue
        for target in parsed(page).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            address, anchor = urldefrag(target)
            address = unquote(urlsplit(address).path)
            file = page if not address else (root / address[1:] if address.startswith("/") else page.parent / address)
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                broken.append(f"{page.relative_to(root)}: {target} does not exist")
            elif (
                anchor not in SCRIPTED_ANCHORS
                and file.suffix == ".html"
                and unquote(anchor) not in parsed(file).anchors
            ):
                broken.append(f"{page.relative_to(root)}: {target} has no such anchor")
    return broken


def test_internal_links_lead_somewhere() -> None:
    if not (HTML / "index.html").exists():
        pytest.fail("the book is not built; run `make book` first")
    assert broken_links(HTML) == []


@pytest.mark.parametrize("target", ["gone.html", "other.html#gone", "#gone", "../outside.html"])
def test_a_broken_link_is_found(target: str, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<p id="here">x</p>')
    (tmp_path / "index.html").write_text('<a href="other.html#here">fine</a>')
    assert broken_links(tmp_path) == []
    (tmp_path / "bad.html").write_text(f'<a href="{target}">bad</a>')
    assert len(broken_links(tmp_path)) == 1
