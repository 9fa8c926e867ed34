"""The claims ledger refuses rows that contradict themselves, and prints what it holds."""

import html
import re

import pytest

from dist_lib import claims
from dist_lib.claims import LABELS, NO_HARDWARE, Claim, ClaimError, claims_html, load_claims

GOOD = {
    "id": "a",
    "paper": "this book",
    "place": "page",
    "statement": "It holds.",
    "label": "reproduced",
    "paper_value": 2.0,
    "our_value": 2.01,
    "tolerance": 0.01,
    "hardware": "CPU",
    "command": "pytest",
}


def made(**changes):
    return Claim(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": "proved"}, "label 'proved'"),
        ({"paper": "unknown"}, "paper 'unknown'"),
        ({"our_value": None}, "needs our_value"),
        ({"command": ""}, "needs our_value"),
        ({"hardware": ""}, "needs our_value"),
        ({"tolerance": None}, "needs a tolerance"),
        ({"our_value": 2.1}, "not within"),
        ({"label": "not attempted", "our_value": None}, "note with the reason"),
        ({"label": "not attempted", "note": "no GPU"}, "no value of ours"),
    ],
)
def test_a_contradiction_is_refused_with_the_claims_name(changes, words):
    with pytest.raises(ClaimError, match="claim a") as caught:
        made(**changes)
    assert words in str(caught.value)


def test_agreement_is_relative_and_text_must_be_equal():
    assert made().agrees(2.0) and not made().agrees(1.9)
    assert made(our_value="1 to 2", paper_value="1 to 2").agrees("1 to 2")
    with pytest.raises(ClaimError):
        made(our_value="1 to 2", paper_value="1 to 3")


@pytest.mark.parametrize(
    ("value", "unit", "text"), [(2.0, "", "2"), (2.5, "x", "2.5×"), (40.0, "%", "40 %"), (3, "GiB", "3 GiB")]
)
def test_a_value_is_shown_with_its_unit(value, unit, text):
    assert made(our_value=value, paper_value=None, unit=unit).shown() == text


def test_a_value_of_the_paper_is_shown_where_there_is_one():
    assert made(our_value=2.0, paper_value=0.278, unit="nats", label="same direction").shown(paper=True) == "0.278 nats"
    with pytest.raises(ClaimError, match="no value of the paper"):
        made(our_value=2.0, paper_value=None).shown(paper=True)


def test_a_ledger_is_read_and_its_faults_are_named(tmp_path):
    path = tmp_path / "claims.toml"
    row = (
        '[[claim]]\nid = "a"\npaper = "this book"\nplace = "p"\nstatement = "s"\nlabel = "not attempted"\nnote = "n"\n'
    )
    path.write_text(row)
    assert list(load_claims(path)) == ["a"]
    path.write_text(row + row)
    with pytest.raises(ClaimError, match="stands twice"):
        load_claims(path)
    path.write_text(row + "vlaue = 3\n")
    with pytest.raises(ClaimError, match="vlaue"):
        load_claims(path)
    path.write_text('[[claim]]\nid = "a"\n')
    with pytest.raises(ClaimError, match="claim a"):
        load_claims(path)


def test_two_functions_cannot_recompute_one_claim(monkeypatch):
    monkeypatch.setattr(claims, "_RECOMPUTERS", {})
    claims.recomputes("a")(lambda: 1.0)
    with pytest.raises(ClaimError, match="two functions"):
        claims.recomputes("a")(lambda: 1.0)
    assert claims.recomputers()["a"]() == 1.0


def test_the_table_escapes_text_and_offers_every_label():
    page = claims_html([made(statement="a < b & c")], filters=True)
    assert "a &lt; b &amp; c" in page and "a < b" not in page
    assert all(label in page for label in LABELS) and 'id="claim-a"' in page
    assert "<form" not in claims_html([made()]) and "book-filters" not in claims_html([made()])


def test_the_filters_offer_the_hardware_of_the_rows_and_each_select_has_its_label():
    gpu = made(id="b", hardware='one "H200" GPU')
    none = made(id="c", label="not attempted", our_value=None, hardware="", note="n")
    page = claims_html([gpu, none, made(), made(id="d")], filters=True)
    offered = re.search(r'<select data-column="hardware">(.*?)</select>', page).group(1)
    values = [html.unescape(v) for v in re.findall(r'<option value="([^"]*)">', offered)]
    assert values == ["", made().hardware, 'one "H200" GPU', NO_HARDWARE]
    rows = {i: html.unescape(h) for i, h in re.findall(r'<tr id="claim-(\w)"[^>]* data-hardware="([^"]*)"', page)}
    assert rows == {"b": 'one "H200" GPU', "c": NO_HARDWARE, "a": made().hardware, "d": made().hardware}
    assert page.count("<select") == len(re.findall(r"<label>\w+ <select[^>]*>.*?</select></label>", page)) == 3
