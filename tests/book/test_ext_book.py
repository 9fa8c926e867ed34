"""The book's Sphinx extension: buttons, assets, equations, sources, minutes, and pages that need no network."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"

spec = importlib.util.spec_from_file_location("book_ext_under_test", ROOT / "book" / "_ext" / "book_ext.py")
assert spec is not None and spec.loader is not None
book_ext = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = book_ext
spec.loader.exec_module(book_ext)

BUTTONS = ("use_repository_button", "use_issues_button", "use_edit_page_button", "use_source_button")


def theme_options(url: str) -> dict:
    options = {"repository_url": url, "launch_buttons": {"colab_url": "https://colab.research.google.com"}}
    options |= dict.fromkeys(BUTTONS, True)
    book_ext.hide_buttons(None, SimpleNamespace(html_theme_options=options))
    return options


def test_buttons_are_hidden_while_the_repository_is_the_placeholder() -> None:
    options = theme_options(book_ext.PLACEHOLDER)
    assert options["launch_buttons"] == {}
    assert not any(options[name] for name in BUTTONS)


def test_buttons_appear_with_a_real_repository() -> None:
    options = theme_options("https://github.com/someone/something")
    assert options["launch_buttons"]
    assert all(options[name] for name in BUTTONS)


def test_the_repository_has_one_source() -> None:
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    shown = (HTML / "book" / "reading-this-book.html").read_text(encoding="utf-8")
    hidden = config["repository"]["url"] == book_ext.PLACEHOLDER
    assert ("colab.research.google.com/github" not in shown) == hidden
    assert ('href="' + config["repository"]["url"] not in shown) == hidden


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?:file|root): (\S+)", contents))
    globs = re.findall(r"glob: (\S+)", contents)
    listed |= {p.relative_to(ROOT).with_suffix("").as_posix() for pattern in globs for p in ROOT.glob(pattern)}
    pages = [p for kind in ("*.md", "*.ipynb") for p in (ROOT / "book").rglob(kind) if ".ipynb_" not in p.as_posix()]
    missing = {p.relative_to(ROOT).with_suffix("").as_posix() for p in pages} - listed
    assert missing == set(), "pages that no reader finds: add them to _toc.yml"


def test_pages_load_nothing_from_elsewhere() -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe|link(?![^>]*rel="canonical"))[^>]*(?:src|href)=["'](https?:)?//[^"']+"""
    )
    for page in HTML.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found = loads.search(text)
        assert found is None, f"{page.relative_to(HTML)} loads {found.group(0)}"
        assert "thebe" not in text.lower(), f"{page.relative_to(HTML)} still speaks of thebe"
    for sheet in (HTML / "_static").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_plotly_and_mathjax_lie_beside_the_pages() -> None:
    for name, least in (("plotly.min.js", 3_000_000), ("mathjax/tex-svg.js", 1_000_000)):
        assert (HTML / "_static" / name).stat().st_size > least


def test_resolve_finds_functions_and_methods_and_says_what_is_missing() -> None:
    from dist_lib.comm import NetworkModel

    assert book_ext.resolve("dist_lib.comm.NetworkModel.all_reduce") is NetworkModel.all_reduce
    assert book_ext.resolve("dist_lib.comm.NetworkModel") is NetworkModel
    with pytest.raises(AttributeError, match="absent"):
        book_ext.resolve("dist_lib.comm.absent")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        book_ext.resolve("nowhere.at_all")


def test_a_chapter_without_equations_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-chapter"):
        book_ext.load_equations("no-such-chapter")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (None, "Not measured yet"),
        ({"notebooks": {}}, "Not measured yet"),
        ({"notebooks": {"book/x.ipynb": {"seconds": 12.4}}}, "Takes 12 s"),
        ({"notebooks": {"book/x.ipynb": {"seconds": 150.0}}}, "Takes 2.5 minutes"),
    ],
)
def test_minutes_come_from_the_status_record(record, text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(book_ext, "ROOT", tmp_path)
    if record is not None:
        (tmp_path / "data" / "results").mkdir(parents=True)
        (tmp_path / "data" / "results" / "status.json").write_text(json.dumps(record))
    role = book_ext.MinutesRole()
    role.text = "book/x"
    nodes, messages = role.run()
    assert nodes[0].astext() == text and messages == []
