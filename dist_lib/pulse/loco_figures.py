"""Pictures of PULSELoCo's gate: one coordinate over rounds, its density over the length of a round, and a fault.

All of it is computed when a figure is made, in one process, with the library's own gate, feedback and outer step on
synthetic weights. Needs plotly (``pip install dist-lib[viz]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from dist_lib import viz
from dist_lib.pulse.loco import feedback, gate
from dist_lib.pulse.loco_config import OuterConfig
from dist_lib.pulse.loco_loop import nesterov_step
from dist_lib.pulse.loco_streams import synthetic_rounds
from dist_lib.pulse.sparsity_measures import ulp

PAPER_RATIO = 17.0
"""Traffic of DiLoCo over that of PULSELoCo as the paper's abstract has it ("over 17x"), largest setting."""


def gate_paths(weight: float, update: float, rounds: int) -> dict[str, list[float]]:
    """One coordinate of one worker whose inner steps want the same in each round, in spacings of bfloat16.

    Args:
        weight: consensus weight at the start; rounded to bfloat16 first.
        update: pseudo-gradient of a round, in spacings.
        rounds: how many.

    Returns:
        ``rounds + 1`` values each: ``"wanted"`` (sum of pseudo-gradients), ``"sent"`` (sum of what passed the gate),
        ``"kept"`` (the buffer).
    """
    theta = torch.tensor([weight]).bfloat16().float()
    spacing = float(ulp(theta))
    kept, momentum = torch.zeros(1), torch.zeros(1)
    wanted = sent = 0.0
    paths: dict[str, list[float]] = {"wanted": [0.0], "sent": [0.0], "kept": [0.0]}
    for _ in range(rounds):
        s = update * spacing + kept
        passed, kept = feedback(s, gate(theta, s))
        wanted, sent = wanted + update, sent + float(passed) / spacing
        nesterov_step(theta, momentum, passed.clone(), lr=0.7, mu=0.9)
        for name, value in (("wanted", wanted), ("sent", sent), ("kept", float(kept) / spacing)):
            paths[name].append(round(value, 4))
    return paths


def gate_figure(weight: float = 0.019, updates: Sequence[float] = (0.07, 0.2, 0.45), rounds: int = 16) -> Any:
    """Sent and kept of one coordinate, one above the other: together they are all that was wanted."""
    traces, facts = [], []
    for update in updates:
        paths = gate_paths(weight, update, rounds)
        where = {"update": update}
        kinds = (("sent", "sent so far", viz.WORK["communication"]), ("kept", "kept in the buffer", viz.WORK["stale"]))
        x = list(range(rounds + 1))
        traces += [viz.bar(x, paths[key], name, color=color, meta=where) for key, name, color in kinds]
        traces.append(
            go.Scatter(
                x=x,
                y=paths["wanted"],
                name="all that was wanted",
                mode="lines+markers",
                line={"color": viz.SERIES[5], "width": 1.5, "dash": "dot"},
                marker={"size": 5},
                meta=where,
            )
        )
        facts.append(f"with {update} a round, {len(set(paths['sent'])) - 1} rounds")
    return viz.figure(
        title="A gate that loses nothing",
        x="round",
        y="sum of updates (BF16 spacings)",
        alt=(
            "Stacked bars of what was sent and what is kept; their height is the line of all updates in every round. "
            f"Of {rounds} rounds the gate opens in only some: {', '.join(facts)}"
        ),
        traces=traces,
        controls=[
            viz.Control(key="update", label="Update of a round (spacings)", values=list(updates), initial=updates[1])
        ],
        barmode="stack",
    )


def cast_error_densities(rounds: int, *, start_from_cast: bool, cells: int = 20_000) -> list[float]:
    """Share of coordinates that one worker sends in each round while its inner steps do nothing at all.

    Args:
        rounds: how many.
        start_from_cast: the fault: inner weights begin at the bfloat16 cast of the consensus, not at the consensus.
        cells: number of normal weights.
    """
    theta = torch.randn(cells, generator=torch.Generator().manual_seed(0)) * 0.02
    momentum, kept, densities = torch.zeros(cells), torch.zeros(cells), []
    for _ in range(rounds):
        begin = theta.bfloat16().float() if start_from_cast else theta
        s = theta - begin + kept
        mask = gate(theta, s)
        passed, kept = feedback(s, mask)
        nesterov_step(theta, momentum, passed, lr=0.7, mu=0.9)
        densities.append(float(mask.double().mean()))
    return densities


def gate_density_figure(
    lrs: Sequence[float] = (1e-6, 3e-6),
    lengths: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    rounds: int = 10,
    cells: int = 20_000,
) -> Any:
    """Gate density over the steps of a round; a control shows what it saves instead, beside the paper's ratio."""
    measures = {"sent coordinates (%)": [], "times less than DiLoCo": []}  # type: dict[str, list[Any]]
    x = [str(h) for h in lengths]
    facts = []
    for i, lr in enumerate(lrs):
        found = [
            list(synthetic_rounds(cells, lr=lr, rounds=rounds, config=OuterConfig(inner_steps=h), coded=True))
            for h in lengths
        ]
        density = [100 * sum(r.gate_density for r in run) / rounds for run in found]
        ratio = [4 * rounds / sum(r.bytes_per_parameter for r in run) for run in found]
        name = f"simulated, lr {lr:.0e}".replace("e-0", "e-")
        for measure, values in zip(measures, (density, ratio), strict=True):
            measures[measure].append(
                viz.line(x, [round(v, 2) for v in values], name, index=i, meta={"measure": measure})
            )
        at = list(lengths).index(8)
        facts.append(f"at 8 steps and {name[-7:]} it is {density[at]:.0f} % and {ratio[at]:.0f} times less")
    ratios = list(measures)[1]
    line = viz.line(x, [PAPER_RATIO] * len(x), "the paper, at 8 steps", index=6, meta={"measure": ratios})
    measures[ratios].append(line)
    names = list(measures)
    return viz.figure(
        title="How often the gate opens",
        x="inner steps of a round (H)",
        y="sent (%), or times less",
        alt=(
            "Lines of the gate's density that rise with the length of a round and with the learning rate: "
            f"{'; '.join(facts)}. The paper reports more than {PAPER_RATIO:g} times"
        ),
        traces=[t for found in measures.values() for t in found],
        controls=[viz.Control(key="measure", label="Shown", values=names, initial=names[0])],
        rtol=0.05,
        xaxis_type="category",
        yaxis_rangemode="tozero",
    )


def cast_error_figure(*, rounds: int = 20) -> Any:
    """Gate density over rounds in which nothing is learned: inner weights from the consensus, or from its cast."""
    x = list(range(1, rounds + 1))
    runs = {"inner weights begin at the consensus": False, "they begin at its BF16 cast": True}
    traces, last = [], []
    for i, (name, fault) in enumerate(runs.items()):
        densities = [round(100 * d, 3) for d in cast_error_densities(rounds, start_from_cast=fault)]
        traces.append(viz.line(x, densities, name, index=i))
        last.append(densities[-1])
    return viz.figure(
        title="A gate that fires on rounding errors",
        x="round",
        y="sent coordinates (%)",
        alt=(
            f"Nothing is learned, and the right gate stays at {last[0]:.0f} %. Where inner weights begin at the cast, "
            f"the buffer gathers the cast's error, and after {rounds} rounds {last[1]:.0f} % are sent"
        ),
        traces=traces,
        rtol=0.1,
    )
