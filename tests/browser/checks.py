"""What must hold on a page of the built book in a real browser. Each function returns faults as sentences."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page, Request, Response

# The theme loads thebe's settings twice; its script throws this on every page and nothing depends on it.
ALLOWED_ERRORS = ("THEBE_JS_URL",)
# Accessibility faults of the theme and its extensions, by axe's rule and a part of the node's HTML.
ALLOWED_VIOLATIONS = {
    "aria-required-children": ('class="docutils citation-list"', 'role="list"', "citation"),
    "aria-deprecated-role": ("doc-biblioentry", "doc-backlink", "citation"),
}
FIGURE = ".book-figure"

UNDRAWN_FIGURES = """selector => [...document.querySelectorAll(selector)].filter(figure => {
  const plot = figure.matches('.js-plotly-plot') ? figure : figure.querySelector('.js-plotly-plot');
  if (!plot || !plot._fullData) return true;
  const shown = plot._fullData.filter(trace => trace.visible === true);
  return shown.length === 0 || !plot.querySelector('.main-svg') || plot.getBoundingClientRect().height < 50;
}).length"""
UNDRAWN_FORMULAS = """() => [...document.querySelectorAll('.math')]
  .filter(node => !node.querySelector('mjx-container')).length"""
RAW_TEX = r"""() => {
  const copy = document.querySelector('article, main, body').cloneNode(true);
  copy.querySelectorAll('pre, code, script, style, mjx-container, textarea').forEach(node => node.remove());
  const found = copy.textContent.match(/\\\(|\\\[|\$\$|\\(frac|sum|mathbf|operatorname|begin)\b/);
  return found ? found[0] : '';
}"""
PALE_FIGURE_TEXT = """selector => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                          return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = c => { const [r, g, b] = c.map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const background = node => { for (let n = node; n; n = n.parentElement) {
      const c = rgb(getComputedStyle(n).backgroundColor); if (c[3] > 250) return c; } return [255, 255, 255, 255]; };
  const pale = [];
  for (const figure of document.querySelectorAll(selector)) {
    const behind = light(background(figure));
    for (const text of figure.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle, .gtitle, .legendtext')) {
      const own = light(rgb(getComputedStyle(text).fill));
      const ratio = (Math.max(own, behind) + 0.05) / (Math.min(own, behind) + 0.05);
      if (ratio < 4.5) pale.push(`${text.textContent} (${ratio.toFixed(2)}:1)`);
    }
  }
  return pale.slice(0, 5);
}"""


@dataclass
class Traffic:
    """Console errors and requests of one page."""

    base: str
    faults: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> Callable[[], None]:
        """Listen to the page; returns the function that stops listening."""
        handlers: dict[str, Any] = {
            "console": self._console,
            "pageerror": lambda error: self._error(str(error)),
            "request": self._request,
            "requestfailed": self._failed,
            "response": self._response,
        }
        for event, handler in handlers.items():
            page.on(event, handler)  # type: ignore[call-overload]
        return lambda: [page.remove_listener(event, handler) for event, handler in handlers.items()] and None

    def _error(self, text: str) -> None:
        if not any(allowed in text for allowed in ALLOWED_ERRORS):
            self.faults.append(f"console error: {text}")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._error(message.text)

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.base, "data:", "blob:", "about:")):
            self.faults.append(f"external request: {request.url}")

    def _failed(self, request: Request) -> None:
        self.faults.append(f"failed request: {request.url} ({request.failure})")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"request answered with {response.status}: {response.url}")


def settle(page: Page, timeout_ms: float = 10_000) -> None:
    """Wait until formulas are set and figures had their chance to be drawn."""
    page.evaluate("() => window.MathJax?.startup?.promise?.then(() => true)")
    try:
        page.wait_for_function(f"s => ({UNDRAWN_FIGURES})(s) === 0", arg=FIGURE, timeout=timeout_ms)
    except Exception as error:  # an undrawn figure is reported by `drawing`, with its count
        if "Timeout" not in str(error):
            raise


def drawing(page: Page) -> list[str]:
    """Figures without traces, formulas not set, raw TeX, text in figures that is too pale."""
    faults = []
    if undrawn := page.evaluate(UNDRAWN_FIGURES, FIGURE):
        faults.append(f"{undrawn} figures show no trace")
    if undrawn := page.evaluate(UNDRAWN_FORMULAS):
        faults.append(f"{undrawn} formulas are not drawn")
    if raw := page.evaluate(RAW_TEX):
        faults.append(f"raw TeX on the page: {raw}")
    if pale := page.evaluate(PALE_FIGURE_TEXT, FIGURE):
        faults.append(f"text in figures below 4.5:1: {pale}")
    return faults


def accessibility(page: Page) -> list[str]:
    """WCAG 2 A and AA violations that axe finds, but for the named exceptions."""
    # Without preload: axe would fetch style sheets again, and their imports relative to the page.
    options = {
        "preload": False,
        "resultTypes": ["violations"],
        "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa"]},
    }
    faults = []
    for violation in Axe().run(page, options=options).response["violations"]:
        allowed = ALLOWED_VIOLATIONS.get(violation["id"], ())
        nodes = [node for node in violation["nodes"] if not any(part in node["html"] for part in allowed)]
        if nodes:
            shown = [f"{' '.join(map(str, node['target']))}: {node['html'][:120]}" for node in nodes[:3]]
            faults.append(f"axe {violation['id']} ({violation['help']}) on {len(nodes)} nodes: {shown}")
    return faults


def inspect(page: Page, base: str, address: str, *, axe: bool = True, wait_ms: float = 10_000) -> list[str]:
    """Open a page and return all its faults."""
    traffic = Traffic(base)
    unwatch = traffic.watch(page)
    page.goto(base + address, wait_until="load")
    settle(page, wait_ms)
    faults = drawing(page) + (accessibility(page) if axe else [])
    unwatch()
    return traffic.faults + faults
