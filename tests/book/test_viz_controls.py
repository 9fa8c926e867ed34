"""Figures in a real browser, from a file: controls by keyboard, data as CSV, both colour schemes, broken input."""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import plotly
import plotly.graph_objects as go
import pytest

from dist_lib import viz
from dist_lib.viz_myst import figure_html
from tools.chromium import ARGUMENTS, find_chromium

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
ALT = "Two straight lines, one for each slope; the second control has no effect on them."


def example() -> go.Figure:
    x = [0, 1, 2]
    traces = [viz.line(x, [k * v for v in x], f"slope {k}", index=k, meta={"slope": k}) for k in (1, 2, 3)]
    traces.append(go.Scatter(x=np.arange(3.0), y=np.array([0.5, 0.25, 0.125]), name="packed, always"))
    slope = viz.Control(key="slope", label="Slope", values=[1, 2, 3], initial=1, kind="range")
    kind = viz.Control(key="kind", label="Kind", values=["a", "b"], initial="a")
    return viz.figure(title="Slopes", x="x (m)", y="y (m)", alt=ALT, traces=traces, controls=[slope, kind])


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH (Debian/Ubuntu: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    folder = tmp_path_factory.mktemp("figure")
    for name in ("figures.js", "book.css"):
        shutil.copy(STATIC / name, folder / name)
    shutil.copy(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", folder)
    figure = figure_html(json.loads(example().to_json()))
    (folder / "page.html").write_text(
        '<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8"><title>t</title>'
        '<link rel="stylesheet" href="book.css"><script src="plotly.min.js"></script><script src="figures.js"></script>'
        f"</head><body><main>{figure}{figure}</main></body></html>",
        encoding="utf-8",
    )
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((folder / "page.html").as_uri())
        page.wait_for_function("() => document.querySelectorAll('[data-drawn]').length === 2")
        yield page
        assert errors == []
        browser.close()


def shown(page, index: int = 0) -> list[str]:
    return page.evaluate(
        "i => document.querySelectorAll('.js-plotly-plot')[i]._fullData"
        ".filter(t => t.visible === true).map(t => t.name)",
        index,
    )


def test_the_keyboard_moves_a_slider_and_its_state_is_spoken(page) -> None:
    slider = page.get_by_label("Slope").first
    slider.focus()
    assert shown(page) == ["slope 1", "packed, always"]
    page.keyboard.press("ArrowRight")
    assert shown(page) == ["slope 2", "packed, always"]
    assert slider.get_attribute("aria-valuetext") == "2"
    assert page.locator("output").first.inner_text() == "2"
    page.keyboard.press("End")
    assert shown(page) == ["slope 3", "packed, always"]
    assert shown(page, 1) == ["slope 1", "packed, always"], "the other figure must not move"
    page.keyboard.press("Home")
    assert shown(page) == ["slope 1", "packed, always"]


def test_a_select_is_labelled_and_leaves_unrelated_traces(page) -> None:
    page.get_by_label("Kind").first.select_option(label="b")
    assert shown(page) == ["slope 1", "packed, always"]


def test_the_data_is_saved_as_csv_even_from_a_file(page) -> None:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Data (CSV)").first.click()
    rows = list(csv.DictReader(Path(waiting.value.path()).read_text(encoding="utf-8").splitlines()))
    assert waiting.value.suggested_filename == "figure-1.csv"
    assert [float(r["y"]) for r in rows if r["trace"] == "slope 3"] == [0, 3, 6]
    assert {r["setting"] for r in rows if r["trace"] == "slope 3"} == {"slope=3"}
    assert [float(r["y"]) for r in rows if r["trace"] == "packed, always"] == [0.5, 0.25, 0.125]


def test_colours_follow_the_scheme(page) -> None:
    colour = "() => getComputedStyle(document.querySelector('.xtitle')).fill"
    light = page.evaluate(colour)
    page.evaluate("() => { document.documentElement.dataset.theme = 'dark'; }")
    page.wait_for_function(f"old => ({colour})() !== old", arg=light)
    page.evaluate("() => { document.documentElement.dataset.theme = 'light'; }")
    page.wait_for_function(f"old => ({colour})() === old", arg=light)


def test_a_figure_is_an_image_with_a_description(page) -> None:
    assert page.get_by_role("img", name=ALT).count() == 2
    assert page.locator("figcaption").first.inner_text().startswith(ALT)


def test_a_figure_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match="description"):
        figure_html({"data": [], "layout": {"meta": {}}})


def test_text_in_a_figure_cannot_end_its_script() -> None:
    hostile = {"data": [{"name": "</script><b>"}], "layout": {"meta": {"alt": 'A "quoted" <b>bold</b> description'}}}
    made = figure_html(hostile)
    assert made.count("</script>") == 1
    assert "<b>bold" not in made and 'aria-label="A &quot;quoted&quot; &lt;b&gt;' in made
