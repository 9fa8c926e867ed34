"""The book's Sphinx extension: local assets, equations, claims, measured minutes, the status page, buttons.

Roles: ``{claim}`id``` prints a number of the ledger, ``{minutes}`page``` the measured run time of a notebook.
Directives: ``{equation} chapter/label``, ``{claims-table}``, ``{status}``, ``{source} dist_lib.module.object``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

ROOT = Path(__file__).resolve().parents[2]
CLAIMS_PAGE = "book/claims"
PLACEHOLDER = "https://github.com/ORG/REPO"


def copy_assets(app: Sphinx) -> None:
    """Put plotly.js and MathJax beside the pages: the book needs no network to be read."""
    if app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    (static / "mathjax").mkdir(parents=True, exist_ok=True)
    plotly = importlib.util.find_spec("plotly")
    if plotly is None or plotly.origin is None:
        raise RuntimeError("plotly is missing; run `make setup`")
    shutil.copy(Path(plotly.origin).parent / "package_data" / "plotly.min.js", static / "plotly.min.js")
    carrier = importlib.metadata.distribution("sphinx-mathjax-offline")
    found = [f for f in carrier.files or [] if f.name == "tex-svg.js"]
    shutil.copy(str(found[0].locate()), static / "mathjax" / "tex-svg.js")


def drop_thebe(app: Sphinx, config: Any) -> None:
    """Keep sphinx-thebe's scripts out of the pages: they need a network, and throw when loaded twice."""
    for name, listeners in app.events.listeners.items():
        kept = [one for one in listeners if not one.handler.__module__.startswith("sphinx_thebe")]
        app.events.listeners[name] = kept
    app.registry.css_files[:] = [one for one in app.registry.css_files if "thebe" not in one[0]]


def name_toggles(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the sidebar's fold buttons a name: the theme draws a bare arrow, silent in a screen reader."""
    draw = context.get("generate_toctree_html")
    if draw is None:
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        tree = draw(*args, **kwargs)
        for toggle in tree.select("details > summary") if hasattr(tree, "select") else ():
            title = toggle.find_parent("li").find("a")
            toggle["aria-label"] = f"Pages of {title.get_text(strip=True)}" if title else "Pages of this part"
        return tree

    context["generate_toctree_html"] = named


def hide_buttons(app: Sphinx, config: Any) -> None:
    """Without a real repository there is nothing to launch, edit or report to."""
    options = config.html_theme_options
    if options.get("repository_url", PLACEHOLDER) == PLACEHOLDER:
        options["launch_buttons"] = {}
        for name in ("use_repository_button", "use_issues_button", "use_edit_page_button", "use_source_button"):
            options[name] = False


def load_equations(chapter: str) -> dict[str, Any]:
    """Equations of a chapter by label, from ``book/<chapter>/equations.py``."""
    path = ROOT / "book" / chapter / "equations.py"
    spec = importlib.util.spec_from_file_location(f"book_{chapter.replace('-', '_')}_equations", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no equations file {path.relative_to(ROOT)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {e.label: e for e in module.EQUATIONS}


def api_reference(name: str, docname: str) -> nodes.Node:
    """A name of the library as code; it links to its API page where there is one."""
    node = addnodes.pending_xref(
        "", refdomain="py", reftype="obj", reftarget=name, refdoc=docname, refexplicit=True, book_optional=True
    )
    node += nodes.literal(text=name)
    return node


def leave_unlinked(app: Sphinx, env: Any, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """An optional reference without a target stays plain text; others are reported as usual."""
    return contnode if node.get("book_optional") else None


class EquationDirective(SphinxDirective):
    """``{equation} chapter/label``: a numbered equation that a test compares with the library."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Insert the formula under the label ``eq-chapter-label``, and a link to what it is tied to."""
        chapter, _, label = self.arguments[0].rpartition("/")
        path = ROOT / "book" / chapter / "equations.py"
        self.env.note_dependency(str(path))
        equations = load_equations(chapter)
        if label not in equations:
            raise self.error(f"no equation {label!r} in {path.relative_to(ROOT)}; there are {sorted(equations)}")
        equation = equations[label]
        name = f"eq-{chapter}-{label}"
        found = self.parse_text_to_nodes(f"```{{math}}\n:label: {name}\n{equation.latex.strip()}\n```")
        if equation.implemented_by:
            tie = nodes.paragraph(classes=["book-tie"])
            code = api_reference(equation.implemented_by, self.env.docname)
            tie += [nodes.Text("Computed by "), code, nodes.Text("; a test compares the two.")]
            found.append(tie)
        return found


class ClaimRole(SphinxRole):
    """``{claim}`id```: our value with its unit; ``{claim}`paper:id```: the paper's."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Insert the number with a link to its row in the ledger."""
        from dist_lib.claims import load_claims

        self.env.note_dependency(str(ROOT / "data" / "claims.toml"))
        claims = load_claims(ROOT / "data" / "claims.toml")
        paper, name = self.text.startswith("paper:"), self.text.removeprefix("paper:")
        if name not in claims:
            message = self.inliner.reporter.error(f"no claim {name!r} in data/claims.toml", line=self.lineno)
            return [], [message]
        claim = claims[name]
        if CLAIMS_PAGE not in self.env.found_docs:
            return [nodes.inline(text=claim.shown(paper=paper), classes=["book-claim"])], []
        uri = self.env.app.builder.get_relative_uri(self.env.docname, CLAIMS_PAGE) + f"#claim-{claim.id}"
        title = f"{claim.label}: {claim.statement}"
        link = nodes.reference(
            text=claim.shown(paper=paper), refuri=uri, reftitle=title, internal=True, classes=["book-claim"]
        )
        return [link], []


class ClaimsTable(SphinxDirective):
    """``{claims-table}``: the ledger, or the part whose ids begin with ``:prefix:``; filters with ``:filters:``."""

    option_spec: ClassVar = {"prefix": directives.unchanged, "filters": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Insert one HTML table."""
        from dist_lib.claims import claims_html, load_claims

        ledger = ROOT / "data" / "claims.toml"
        self.env.note_dependency(str(ledger))
        prefixes = tuple(self.options.get("prefix", "").split())
        chosen = [c for c in load_claims(ledger).values() if not prefixes or c.id.startswith(prefixes)]
        if not chosen:
            raise self.error(f"no claim has an id that begins with {prefixes}")
        return [nodes.raw(text=claims_html(chosen, filters="filters" in self.options), format="html")]


def load_status() -> dict[str, Any]:
    """The record of the last measured run, or an empty one."""
    path = ROOT / "data" / "results" / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class MinutesRole(SphinxRole):
    """``{minutes}`book/muon/index```: measured time of a notebook."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Insert seconds or minutes from the status record."""
        entry = load_status().get("notebooks", {}).get(f"{self.text}.ipynb")
        if entry is None:
            text = "Not measured yet"
        else:
            seconds = float(entry["seconds"])
            text = f"Takes {seconds:.0f} s" if seconds < 90 else f"Takes {seconds / 60:.1f} minutes"
        return [nodes.inline(text=text, classes=["book-minutes"])], []


class StatusDirective(SphinxDirective):
    """``{status}``: versions, hardware, run times of notebooks and of the parts of the tests."""

    def run(self) -> list[nodes.Node]:
        """Insert tables made from the status record."""
        status = load_status()
        rows: list[str] = []
        for title, key in (("Hardware", "hardware"), ("Versions", "versions")):
            entries = status.get(key, {})
            if entries:
                rows += [f"\n**{title}**\n", "| what | value |", "|---|---|"]
                rows += [f"| {k.replace('_', ' ')} | {v} |" for k, v in entries.items()]
        if status.get("notebooks"):
            rows += ["\n**Notebooks**\n", "| page | run time (s) | peak memory (GiB) |", "|---|---:|---:|"]
            for name, entry in sorted(status["notebooks"].items()):
                peak = entry.get("peak_memory_gib")
                rows.append(f"| `{name}` | {entry['seconds']:.0f} | {'' if peak is None else f'{peak:.2f}'} |")
        if status.get("tests"):
            counts = ("passed", "failed", "skipped")
            rows += [
                "\n**Parts of the tests**\n",
                f"| part | minutes | {' | '.join(counts)} |",
                "|---|---:|---:|---:|---:|",
            ]
            for name, part in status["tests"].items():
                shown = " | ".join(str(part.get(c, "")) for c in counts)
                rows.append(f"| {name} | {part['minutes']:.1f} | {shown} |")
        return self.parse_text_to_nodes("\n".join(rows) if rows else "Nothing has been measured yet.")


def resolve(name: str) -> Any:
    """The object of a dotted name: a module's function or class, or a method of a class."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(f"no module holds {name!r}")


class SourceDirective(SphinxDirective):
    """``{source} dist_lib.ops.newton_schulz``: the library's own code, shown, never retyped."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Insert the source of one object, with its file as a caption."""
        value = inspect.unwrap(resolve(self.arguments[0]))
        file = Path(inspect.getsourcefile(value) or "")
        self.env.note_dependency(str(file))
        block = nodes.literal_block(text=textwrap.dedent(inspect.getsource(value)), language="python")
        line = inspect.getsourcelines(value)[1]
        home = Path(importlib.import_module(self.arguments[0].split(".")[0]).__file__ or "").resolve().parents[1]
        caption = nodes.paragraph(
            text=f"{file.resolve().relative_to(home).as_posix()}, line {line}: ", classes=["book-file"]
        )
        caption += api_reference(self.arguments[0], self.env.docname)
        return [nodes.container("", caption, block, classes=["book-source"])]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register everything."""
    app.add_directive("equation", EquationDirective)
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("status", StatusDirective)
    app.add_directive("source", SourceDirective)
    app.add_role("claim", ClaimRole())
    app.add_role("minutes", MinutesRole())
    app.connect("config-inited", drop_thebe)
    app.connect("missing-reference", leave_unlinked)
    app.connect("html-page-context", name_toggles, priority=900)
    app.connect("config-inited", hide_buttons, priority=900)
    app.connect("builder-inited", copy_assets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
