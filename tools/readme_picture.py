"""Draw the README's picture: one modelled training step under each method, as an SVG without fonts or scripts.

The numbers are those of `dist_lib.step_model`; a test compares the committed picture with what this script draws.
"""

import argparse
from pathlib import Path

from dist_lib.step_model import METHODS, Scenario, timeline
from dist_lib.viz import WORK

PICTURE = Path(__file__).resolve().parent.parent / "book" / "_static" / "step.svg"
SHOWN = ("baseline", "dmuon", "agoq", "async", "pulse")
LABEL, WIDTH, LANE, GAP, TOP = 186, 700, 9, 16, 14
TEXT = "#7A828E"
LEGEND = (
    ("forward", "forward"),
    ("stale", "forward, older weights"),
    ("backward", "backward"),
    ("communication", "on a link"),
    ("optimizer", "optimizer"),
)


def draw(scenario: Scenario) -> str:
    """Return the SVG."""
    lanes = [f"stage {k + 1}" for k in range(scenario.stages)] + ["network", "to sampler"]
    steps = {method: timeline(method, scenario) for method in SHOWN}
    scale = WIDTH / max(step.sampler_s for step in steps.values())
    block = LANE * len(lanes)
    height = TOP + len(SHOWN) * (block + GAP) + 44
    body = []
    for row, method in enumerate(SHOWN):
        top = TOP + row * (block + GAP)
        step = steps[method]
        body.append(f'<text x="0" y="{top + 24}" font-size="17" font-weight="600">{METHODS[method]}</text>')
        body.append(f'<text x="0" y="{top + 44}" font-size="13">step {step.step_s:.2f} s</text>')
        for s in step.segments:
            x, y = LABEL + s.start * scale, top + lanes.index(s.lane) * LANE
            opacity = ' opacity="0.25"' if s.kind == "idle" else ""
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(s.seconds * scale - 0.6, 0.6):.1f}" height="{LANE - 1.5}" '
                f'fill="{WORK[s.kind]}"{opacity}/>'
            )
        end = LABEL + step.step_s * scale
        body.append(
            f'<path d="M{end:.1f} {top - 4}V{top + block + 2}" stroke="{TEXT}" stroke-width="1.5" '
            f'stroke-dasharray="3 3"/>'
        )
    x, y = float(LABEL), height - 22
    for kind, name in LEGEND:
        body.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{WORK[kind]}"/>')
        body.append(f'<text x="{x + 17:.0f}" y="{y + 11}" font-size="13">{name}</text>')
        x += 34 + 7.2 * len(name)
    title = "One training step of a 7B model, modelled: the synchronous baseline, DMuon, AGoQ, one-step delay and PULSE"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + WIDTH + 8} {height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif" fill="{TEXT}"><title>{title}</title>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def main() -> int:
    """Write the picture."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None).parse_args()
    PICTURE.write_text(draw(Scenario()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
