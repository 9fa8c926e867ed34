"""Figures: what is refused, what is shown first, and colours that can be seen on both pages."""

import re
from pathlib import Path

import pytest

from dist_lib import viz

ALT = "Loss falls from 5.5 to 2.1 over two hundred steps."
STYLE = Path(__file__).resolve().parents[2] / "book" / "_static" / "book.css"
GOOD = {"title": "Loss", "x": "step", "y": "loss (nats)", "alt": ALT}


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def page_colours():
    found = re.findall(r"--pst-color-(?:on-)?background: (#[0-9a-f]{6})", STYLE.read_text(encoding="utf-8"))
    return sorted({"#ffffff", *found})


def test_contrast_is_the_known_one():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("color", sorted({*viz.PAPER.values(), *viz.WORK.values(), *viz.SERIES}))
def test_every_colour_is_seen_on_the_light_and_the_dark_page(color):
    pages = page_colours()
    assert any(luminance(p) < 0.05 for p in pages) and any(luminance(p) > 0.9 for p in pages)
    assert {page: round(contrast(color, page), 2) for page in pages if contrast(color, page) < 3} == {}


def test_neighbouring_series_differ_in_colour_and_dash():
    for index in range(len(viz.DASHES)):
        one, two = (viz.line([0, 1], [0, 1], "a", index=i).line for i in (index, index + 1))
        assert one.color != two.color and one.dash != two.dash


@pytest.mark.parametrize(
    ("change", "word"), [({"title": " "}, "title"), ({"x": ""}, "x"), ({"y": ""}, "y"), ({"alt": "A loss."}, "alt")]
)
def test_a_figure_without_words_is_refused(change, word):
    with pytest.raises(ValueError, match=f"^{word}="):
        viz.figure(**{**GOOD, **change})


def test_a_trace_for_a_value_that_no_control_offers_is_refused():
    steps = viz.Control(key="steps", label="Steps", values=[3, 5], initial=5)
    with pytest.raises(ValueError, match="steps=4"):
        viz.figure(**GOOD, controls=[steps], traces=[viz.line([0], [1], "a", meta={"steps": 4})])


@pytest.mark.parametrize(("values", "initial"), [([5], 5), ([3, 5], 4)])
def test_a_control_without_a_choice_is_refused(values, initial):
    with pytest.raises(ValueError, match="control 'steps'"):
        viz.Control(key="steps", label="Steps", values=values, initial=initial)


def test_the_initial_state_is_shown_and_the_controls_travel_in_the_figure():
    controls = [
        viz.Control(key="steps", label="Steps", values=[3, 5], initial=5, kind="range"),
        viz.Control(key="set", label="Set", values=["a", "b"], initial="a"),
    ]
    metas = [{"steps": 5, "set": "a"}, {"steps": 3, "set": "a"}, {"steps": 5, "set": "b"}, {"steps": 5}, None]
    fig = viz.figure(**GOOD, controls=controls, rtol=1e-3, traces=[viz.line([0], [1], str(m), meta=m) for m in metas])
    assert [t.visible for t in fig.data] == [True, False, False, True, True]
    assert fig.layout.meta["alt"] == ALT and fig.layout.meta["rtol"] == 1e-3
    assert [(c["key"], c["kind"], c["initial"]) for c in fig.layout.meta["controls"]] == [
        ("steps", "range", 5),
        ("set", "select", "a"),
    ]


def test_a_timeline_has_one_trace_a_kind_with_begin_and_length():
    spans = [("gpu 0", 0.0, 2.0, "forward"), ("gpu 0", 2.0, 5.0, "backward"), ("gpu 1", 1.0, 4.0, "forward")]
    forward, backward = viz.timeline(spans, labels={"forward": "F"})
    assert (forward.name, backward.name) == ("F", "backward")
    assert list(forward.y) == ["gpu 0", "gpu 1"] and list(forward.base) == [0.0, 1.0] and list(forward.x) == [2.0, 3.0]
    assert forward.marker.color == viz.WORK["forward"] != backward.marker.color


@pytest.mark.parametrize("span", [("a", 0.0, 1.0, "sleep"), ("a", 2.0, 1.0, "forward")])
def test_a_span_of_no_kind_or_no_length_is_refused(span):
    with pytest.raises(ValueError, match="kinds are"):
        viz.timeline([span])
