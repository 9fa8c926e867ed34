"""Print the built book into one PDF, page by page in the order of the table of contents, with headless Chromium.

It needs a built book (`make book`) and a Chromium on the PATH, no network. Pages are printed from their files, after
formulas and figures are drawn, and joined with pypdf.
"""

import argparse
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from chromium import ARGUMENTS, find_chromium

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"


def pages(node: Any) -> list[str]:
    """Return the page names of a table of contents, in reading order."""
    if isinstance(node, list):
        return [name for entry in node for name in pages(entry)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("root", "file") if key in node]
    return own + [name for key in ("parts", "chapters", "sections", "entries") for name in pages(node.get(key))]


def main() -> int:
    """Print and join; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "_build" / "pdf" / "book.pdf", help="the PDF to write")
    args = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        print("pdf: no Chromium on the PATH; install it (Debian/Ubuntu: apt install chromium).", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright
    from pypdf import PdfWriter

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    writer = PdfWriter()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        page = browser.new_page(color_scheme="light")
        for name in pages(toc):
            path = HTML / f"{Path(name).with_suffix('') if name.endswith(('.md', '.ipynb')) else name}.html"
            page.goto(path.as_uri(), wait_until="load")
            page.evaluate("() => window.MathJax?.startup?.promise")
            page.wait_for_function(
                "() => [...document.querySelectorAll('.book-figure')].every(f => f.querySelector('.main-svg'))"
            )
            title = page.title().split(" — ")[0]
            printed = page.pdf(format="A4", print_background=True, margin={"top": "15mm", "bottom": "15mm"})
            writer.append(BytesIO(printed), outline_item=title)
        browser.close()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    writer.write(args.output)
    print(f"pdf: {len(writer.pages)} pages in {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
