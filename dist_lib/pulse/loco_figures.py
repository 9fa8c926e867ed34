"""Pictures of PULSELoCo's gate: one coordinate over rounds, its density over the length of a round, and a fault.

All of it is computed when a figure is made, in one process, with the library's own gate, feedback and outer step on
synthetic weights. Needs plotly (``pip install dist-lib[viz]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from dist_lib import viz
from dist_lib.pulse.loco import feedback, gate
from dist_lib.pulse.loco_loop import nesterov_step
from dist_lib.pulse.loco_payload import SparseUpdate, encode_update
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


@dataclass(frozen=True)
class GateRound:
    """What one simulated round sent.

    Attributes:
        density: share of coordinates that a worker sent, mean over workers.
        union: share that any worker sent.
        ratio: dense bytes over a worker's coded bytes.
    """

    density: float
    union: float
    ratio: float


class _Inner:
    """AdamW without decay on independent noise; keeps its moments over rounds."""

    def __init__(self, cells: int, lr: float, seed: int) -> None:
        self.m, self.v, self.t, self.lr = torch.zeros(cells), torch.zeros(cells), 0, lr
        self.generator = torch.Generator().manual_seed(seed)

    def run(self, w: Tensor, steps: int) -> Tensor:
        """Take ``steps`` steps in place."""
        for _ in range(steps):
            self.t += 1
            g = torch.randn(w.numel(), generator=self.generator)
            self.m.lerp_(g, 0.1)
            self.v.mul_(0.999).addcmul_(g, g, value=0.001)
            root = (self.v / (1 - 0.999**self.t)).sqrt_().add_(1e-8)
            w.addcdiv_(self.m, root, value=-self.lr / (1 - 0.9**self.t))
        return w


def simulate_gate(
    *,
    lr: float,
    inner_steps: int,
    rounds: int,
    workers: int = 4,
    cells: int = 20_000,
    start_from_cast: bool = False,
) -> list[GateRound]:
    """PULSELoCo on normal weights with independent noise for gradients; a synthetic stream, not a model.

    Args:
        lr: of the inner AdamW (0.9, 0.999).
        inner_steps, rounds, workers, cells: sizes.
        start_from_cast: the fault: inner weights begin at the bfloat16 cast of the consensus, not at the consensus.
    """
    theta = torch.randn(cells, generator=torch.Generator().manual_seed(0)) * 0.02
    momentum = torch.zeros(cells)
    kept = [torch.zeros(cells) for _ in range(workers)]
    inner = [_Inner(cells, lr, 1 + r) for r in range(workers)]
    done = []
    for number in range(rounds):
        total, union = torch.zeros(cells), torch.zeros(cells, dtype=torch.bool)
        sent = nbytes = 0
        for r in range(workers):
            begin = theta.bfloat16().float() if start_from_cast else theta.clone()
            s = theta - inner[r].run(begin, inner_steps) + kept[r]
            mask = gate(theta, s)
            passed, kept[r] = feedback(s, mask)
            positions = mask.nonzero().view(-1)
            segments = ((positions.to(torch.int32).numpy().view("u4"), s[positions].numpy()),)
            nbytes += len(encode_update(SparseUpdate(number, r, cells, segments)))
            sent, union = sent + positions.numel(), union | mask
            total += passed
        nesterov_step(theta, momentum, total / workers, lr=0.7, mu=0.9)
        share = sent / workers / cells
        done.append(GateRound(share, float(union.double().mean()), 4 * cells * workers / nbytes))
    return done


def gate_density_figure(
    lrs: Sequence[float] = (1e-6, 3e-6), lengths: Sequence[int] = (1, 2, 4, 8, 16), *, rounds: int = 10
) -> Any:
    """Gate density over the steps of a round; a control shows what it saves instead, beside the paper's ratio."""
    measures = {"sent coordinates (%)": [], "times less than DiLoCo": []}  # type: dict[str, list[Any]]
    x = [str(h) for h in lengths]
    facts = []
    for i, lr in enumerate(lrs):
        found = [simulate_gate(lr=lr, inner_steps=h, rounds=rounds) for h in lengths]
        density = [100 * sum(g.density for g in run) / rounds for run in found]
        ratio = [rounds / sum(1 / g.ratio for g in run) for run in found]
        name = f"simulated, lr {lr:.0e}".replace("e-0", "e-")
        for measure, values in zip(measures, (density, ratio), strict=True):
            measures[measure].append(
                viz.line(x, [round(v, 2) for v in values], name, index=i, meta={"measure": measure})
            )
        at = list(lengths).index(8)
        facts.append(f"at 8 steps and lr {lr:.0e} it is {density[at]:.0f} % and {ratio[at]:.1f} times less")
    ratios = list(measures)[1]
    line = viz.line(x, [PAPER_RATIO] * len(x), "the paper, at 8 steps", index=6, meta={"measure": ratios})
    measures[ratios].append(line)
    names = list(measures)
    return viz.figure(
        title="How often the gate opens",
        x="inner steps of a round (H)",
        y="measure",
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


def cast_error_figure(*, rounds: int = 14, lr: float = 1e-9) -> Any:
    """Gate density over rounds in which next to nothing is learned: inner weights from the consensus, or its cast."""
    x = list(range(1, rounds + 1))
    runs = {
        "inner weights begin at the consensus": False,
        "they begin at its BF16 cast": True,
    }
    traces, last = [], []
    for i, (name, fault) in enumerate(runs.items()):
        found = simulate_gate(lr=lr, inner_steps=1, rounds=rounds, workers=1, start_from_cast=fault)
        traces.append(viz.line(x, [round(100 * g.density, 3) for g in found], name, index=i))
        last.append(100 * found[-1].density)
    return viz.figure(
        title="A gate that fires on rounding errors",
        x="round",
        y="sent coordinates (%)",
        alt=(
            f"Nothing is learned, and the right gate stays at {last[0]:.2f} %. Where inner weights begin "
            f"at the cast, the buffer gathers the cast's error and the density climbs to {last[1]:.0f} %"
        ),
        traces=traces,
        rtol=0.02,
    )
