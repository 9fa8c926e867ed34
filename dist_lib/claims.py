"""The claims ledger: every number of the papers that a chapter mentions, and every number that we promise.

``data/claims.toml`` holds the claims; this module reads and validates them. A claim says who made it and where, what
value it states, what we found, within which tolerance, on what, and by which command. Its label is one of
:data:`LABELS`. The book prints numbers from here and types none by hand.
"""

from __future__ import annotations

import html
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

LABELS: dict[str, str] = {
    "reproduced": "the same number within the tolerance",
    "same direction": "holds at our scale, with our number",
    "modelled": "our cost model gives it from first principles, with its error",
    "recorded on GPU": "measured on a GPU; the result file is in the repository",
    "not attempted": "not tried here, with the reason",
    "contradicted": "we see something else",
}
PAPERS = ("DMuon", "AGoQ", "One-step delay", "PULSE", "Muon", "this book")
NO_HARDWARE = "none: nothing was run"
_DEFAULT = Path(__file__).resolve().parents[1] / "data" / "claims.toml"
_NEEDS_OUR_VALUE = ("reproduced", "same direction", "modelled", "recorded on GPU", "contradicted")


class ClaimError(ValueError):
    """A ledger that contradicts itself; the message names the claim."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the ledger.

    Attributes:
        id: short unique name.
        paper: who claims it, one of :data:`PAPERS`.
        place: table, equation or section; for our own claims the page.
        statement: one sentence.
        paper_value, our_value: numbers, ranges as text, or None.
        unit: of both values; empty for a ratio or a count.
        tolerance: relative; needed for ``reproduced``.
        hardware: on what our value was found.
        command: what recomputes it.
        label: a key of :data:`LABELS`.
        note: conditions, errors of a model, or the reason for not attempting.
    """

    id: str
    paper: str
    place: str
    statement: str
    label: str
    paper_value: float | str | None = None
    our_value: float | str | None = None
    unit: str = ""
    tolerance: float | None = None
    hardware: str = ""
    command: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ClaimError(f"claim {self.id}: label {self.label!r} is none of {list(LABELS)}")
        if self.paper not in PAPERS:
            raise ClaimError(f"claim {self.id}: paper {self.paper!r} is none of {list(PAPERS)}")
        if self.label in _NEEDS_OUR_VALUE and (self.our_value is None or not self.command or not self.hardware):
            raise ClaimError(f"claim {self.id}: {self.label!r} needs our_value, hardware and command")
        if self.label == "not attempted" and (self.our_value is not None or not self.note):
            raise ClaimError(f"claim {self.id}: 'not attempted' has no value of ours, and a note with the reason")
        if self.label == "reproduced":
            self._check_reproduced()

    def _check_reproduced(self) -> None:
        if self.tolerance is None:
            raise ClaimError(f"claim {self.id}: 'reproduced' needs a tolerance (relative; 0 for exact)")
        if self.paper_value is not None and not self.agrees(self.paper_value):
            raise ClaimError(
                f"claim {self.id}: {self.our_value} is not within {self.tolerance} of {self.paper_value}; "
                f"label it 'same direction' or 'contradicted'"
            )

    def agrees(self, value: float | str) -> bool:
        """Whether ``our_value`` equals ``value`` within the relative tolerance (text must be equal)."""
        if isinstance(value, str) or isinstance(self.our_value, str) or self.our_value is None:
            return value == self.our_value
        return abs(self.our_value - value) <= (self.tolerance or 0.0) * abs(value)

    def shown(self, *, paper: bool = False) -> str:
        """Our value with its unit, or the paper's, as it stands in prose.

        Raises:
            ClaimError: the claim does not have that value.
        """
        found = self.paper_value if paper else self.our_value
        if found is None:
            raise ClaimError(f"claim {self.id} has no value of {'the paper' if paper else 'ours'} to show")
        value = found if isinstance(found, str) else f"{found:g}"
        if self.unit in ("x", "%"):
            return f"{value}{'×' if self.unit == 'x' else ' %'}"
        return f"{value} {self.unit}".rstrip()


def load_claims(path: Path | None = None) -> dict[str, Claim]:
    """Read and validate the ledger; default: ``data/claims.toml`` of this repository.

    Raises:
        ClaimError: naming the claim and what is wrong with it.
    """
    with (path or _DEFAULT).open("rb") as file:
        rows: list[dict[str, Any]] = tomllib.load(file).get("claim", [])
    known = {f.name for f in fields(Claim)}
    claims: dict[str, Claim] = {}
    for row in rows:
        name = row.get("id", "without an id")
        if unknown := set(row) - known:
            raise ClaimError(f"claim {name}: unknown entries {sorted(unknown)}; allowed are {sorted(known)}")
        try:
            claim = Claim(**row)
        except TypeError as error:
            raise ClaimError(f"claim {name}: {error}") from error
        if claim.id in claims:
            raise ClaimError(f"claim {claim.id} stands twice")
        claims[claim.id] = claim
    return claims


_RECOMPUTERS: dict[str, Callable[[], float | str]] = {}


def recomputes(claim_id: str) -> Callable[[Callable[[], float | str]], Callable[[], float | str]]:
    """Decorator: the function computes ``our_value`` of a claim afresh; the tests compare it with the ledger."""

    def register(function: Callable[[], float | str]) -> Callable[[], float | str]:
        if claim_id in _RECOMPUTERS:
            raise ClaimError(f"claim {claim_id} is recomputed by two functions")
        _RECOMPUTERS[claim_id] = function
        return function

    return register


def recomputers() -> dict[str, Callable[[], float | str]]:
    """All functions registered so far, by claim."""
    return dict(_RECOMPUTERS)


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}".replace(",", "\u202f")  # a narrow space that does not break
    else:
        text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return html.escape(text)


def _filters(claims: Sequence[Claim]) -> str:
    """A text box, and a select for each of paper, label and hardware; each inside its label."""
    choices: dict[str, Sequence[str]] = {
        "paper": [p for p in PAPERS if any(c.paper == p for c in claims)],
        "label": list(LABELS),
        "hardware": sorted({c.hardware or NO_HARDWARE for c in claims}, key=lambda h: (h == NO_HARDWARE, h)),
    }
    form = '<div class="book-filters"><label>Search <input type="search" data-text="1"></label>'
    for name, values in choices.items():
        options = "".join(f'<option value="{html.escape(v)}">{html.escape(v)}</option>' for v in values)
        form += f'<label>{name.capitalize()} <select data-column="{name}"><option value="">all</option>{options}'
        form += "</select></label>"
    return form + '<span class="book-count" role="status"></span></div>'


def claims_html(claims: Sequence[Claim], *, filters: bool = False) -> str:
    """The ledger as an HTML table, with a text box and selects above it if ``filters``."""
    rows = []
    for c in claims:
        unit = f" {html.escape(c.unit)}" if c.unit else ""
        paper = f"{_cell(c.paper_value)}{unit}" if c.paper_value is not None else "–"
        ours = f"{_cell(c.our_value)}{unit}" if c.our_value is not None else "–"
        how = f"<code>{html.escape(c.command)}</code>" if c.command else ""
        about = "<br>".join(p for p in (html.escape(c.hardware), how, html.escape(c.note)) if p)
        kind = c.label.replace(" ", "-").lower()
        rows.append(
            f'<tr id="claim-{c.id}" data-paper="{html.escape(c.paper)}" data-label="{c.label}" '
            f'data-hardware="{html.escape(c.hardware or NO_HARDWARE)}">'
            f'<td>{html.escape(c.statement)}<br><span class="book-place">{html.escape(c.paper)}, '
            f'{html.escape(c.place)}</span><br><span class="book-how">{about}</span></td>'
            f'<td class="book-number">{paper}</td><td class="book-number">{ours}</td>'
            f'<td><span class="book-label {kind}">{c.label}</span></td></tr>'
        )
    head = "<tr><th>claim</th><th>stated</th><th>here</th><th>label</th></tr>"
    form = _filters(claims) if filters else ""
    cls = "book-ledger filters" if filters else "book-ledger"
    return (
        f'<div class="{cls}">{form}<div class="book-scroll" tabindex="0" role="region" aria-label="Claims">'
        f'<table class="table"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></div>"
    )
