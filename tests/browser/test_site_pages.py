"""Every page of the built book in a real browser, in light and in dark, with no network."""

import re
import shutil
from pathlib import Path

import pytest

from tests.browser.checks import FIGURE, accessibility, drawing, inspect, settle
from tests.browser.conftest import HTML, serve

REDIRECT = re.compile(r'<meta http-equiv="refresh" content="0; *url=([^"]+)"', re.IGNORECASE)
FILES = sorted(path for path in HTML.rglob("*.html") if not path.relative_to(HTML).parts[0].startswith("_"))
REDIRECTS = [path for path in FILES if REDIRECT.search(path.read_text(encoding="utf-8"))]
PAGES = [path.relative_to(HTML).as_posix() for path in FILES if path not in REDIRECTS]


def figure_pages() -> list[str]:
    marker = f'class="{FIGURE[1:]}'
    return [page for page in PAGES if marker in (HTML / page).read_text(encoding="utf-8")]


def test_the_book_has_pages_and_figures(site: str) -> None:
    assert "book/index.html" in PAGES
    assert figure_pages(), "no page of the book holds a figure"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", PAGES)
def test_page(address: str, scheme: str, site: str, open_page) -> None:
    page = open_page(scheme)
    assert inspect(page, site, address) == []
    assert page.evaluate("() => document.documentElement.dataset.theme") == scheme


def test_redirects_lead_to_pages(site: str) -> None:
    for path in REDIRECTS:
        match = REDIRECT.search(path.read_text(encoding="utf-8"))
        assert match is not None
        assert (path.parent / match.group(1)).is_file(), f"{path.name} leads to {match.group(1)}"


def test_a_page_opens_from_its_file(open_page) -> None:
    page = open_page()
    path = HTML / figure_pages()[0]
    assert inspect(page, "file://", str(path), axe=False) == []
    assert page.locator(FIGURE).count() > 0


def test_colours_follow_the_theme_button(site: str, open_page) -> None:
    page = open_page("light")
    page.goto(site + figure_pages()[0], wait_until="load")
    settle(page)
    for _ in range(3):
        if page.evaluate("() => document.documentElement.dataset.theme") == "dark":
            break
        page.locator(".theme-switch-button:visible").first.click()
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    page.wait_for_timeout(500)
    assert drawing(page) + accessibility(page) == []


@pytest.mark.parametrize("column", ["paper", "label", "hardware"])
def test_the_ledgers_filters_keep_the_rows_they_name(column: str, site: str, open_page) -> None:
    page = open_page()
    page.goto(site + "book/claims.html", wait_until="load")
    select, rows = page.get_by_role("combobox", name=column.capitalize()), page.locator(".book-ledger.filters tbody tr")
    total = rows.count()
    values = [v for v in select.locator("option").evaluate_all("all => all.map(o => o.value)") if v]
    assert len(values) > 1, f"there is nothing to choose for {column}"
    kept = 0
    for value in values:
        select.select_option(value)
        shown = rows.evaluate_all("(all, c) => all.filter(r => r.offsetHeight > 0).map(r => r.dataset[c])", column)
        assert set(shown) <= {value}
        assert page.locator(".book-count").inner_text() == f"{len(shown)} of {total} claims"
        kept += len(shown)
    assert kept == total, "every row belongs to one choice"


def broken_copy(tmp_path: Path, change) -> str:
    """A site of one figure page with a planted fault; returns the page's address."""
    address = figure_pages()[0]
    for entry in HTML.iterdir():
        if entry.name.startswith("_"):
            (tmp_path / entry.name).symlink_to(entry)
    target = tmp_path / address
    target.parent.mkdir(parents=True, exist_ok=True)
    source = (HTML / address).read_text(encoding="utf-8")
    changed = change(source)
    assert changed != source
    target.write_text(changed, encoding="utf-8")
    return address


def break_figure(html: str) -> str:
    """Damage the JSON of every figure."""
    return re.sub(r'(<script type="application/json"[^>]*>)\s*\{', r"\1{{", html)


def empty_figure(html: str) -> str:
    """Leave the figures' places but remove the script that draws them."""
    return re.sub(r"<script[^>]*figures\.js[^>]*></script>", "", html)


def add_external_image(html: str) -> str:
    return html.replace("</article>", '<img src="http://example.org/a.png" alt=""></article>')


def add_pale_text(html: str) -> str:
    return html.replace("</article>", '<p style="color:#ccc;background:#fff">pale</p></article>')


def add_raw_formula(html: str) -> str:
    return html.replace("</article>", r"<p>\(x^2\)</p></article>").replace("tex-svg.js", "none.js")


PLANTED = [
    (break_figure, "figures show no trace"),
    (empty_figure, "figures show no trace"),
    (add_external_image, "external request"),
    (add_pale_text, "color-contrast"),
    (add_raw_formula, "raw TeX"),
]


@pytest.mark.parametrize(("change", "message"), PLANTED, ids=[change.__name__ for change, _ in PLANTED])
def test_a_planted_fault_is_found(change, message: str, tmp_path: Path, site: str, open_page) -> None:
    address = broken_copy(tmp_path, change)
    server, base = serve(tmp_path)
    try:
        faults = inspect(open_page(), base, address, wait_ms=2_000)
    finally:
        server.shutdown()
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert any(message in fault for fault in faults), faults
