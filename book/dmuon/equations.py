"""Numbered equations of the DMuon chapter, each with an evaluation outside the library's own code.

Volumes are counted message by message, padded parts are cut from tensors, bounds are compared with the jobs of the
known worst case, and times are added up by hand.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from dist_lib.checks import Equation
from dist_lib.comm import NetworkModel
from dist_lib.dmuon.bytes import Sizes, chunk_elements, step_payload, wire_share
from dist_lib.dmuon.cost_model import Hardware, exposed_seconds, optimizer_times, saturation_ranks
from dist_lib.dmuon.costs import FlopCost
from dist_lib.dmuon.layout import rank_of_slot
from dist_lib.dmuon.plan import MatrixSpec, OwnerPlan, make_plan
from dist_lib.dmuon.solvers import Problem, lpt
from dist_lib.dmuon.workloads import workload
from dist_lib.ops import newton_schulz
from dist_lib.optim import Muon, update_scale

Shapes = tuple[tuple[int, int], ...]
SHAPES: Shapes = ((8, 6), (5, 7), (12, 4), (1, 9), (16, 2))


def _specs(shapes: Shapes) -> list[MatrixSpec]:
    return [MatrixSpec(f"layers.{i}.weight", shape) for i, shape in enumerate(shapes)]


def _plan(shapes: Shapes, world: int) -> OwnerPlan:
    return make_plan(_specs(shapes), world, cost=FlopCost(batch=1))


# the update of an owner


def _gradients(world: int, steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(4, 6, generator=generator) for _ in range(world)] for _ in range(steps)]


def _update(world: int, lr: float, mu: float, decay: float) -> list[float]:
    weight = buffer = torch.zeros(4, 6)
    weight = weight + 0.1
    for gradients in _gradients(world, 3):
        mean = sum(gradients) / world
        buffer = mu * buffer + mean
        update = newton_schulz(mean + mu * buffer)
        weight = (1 - lr * decay) * weight - lr * 0.2 * 6**0.5 * update
    return list(weight.flatten().tolist())


def _muon(world: int, lr: float, mu: float, decay: float) -> list[float]:
    weight = torch.nn.Parameter(torch.full((4, 6), 0.1))
    assert abs(update_scale("match_rms_adamw", 4, 6) - 0.2 * 6**0.5) < 1e-12
    optimizer = Muon([weight], lr, momentum=mu, weight_decay=decay)
    for gradients in _gradients(world, 3):
        weight.grad = sum(gradients, torch.zeros(4, 6)) / world
        optimizer.step()
    return list(weight.detach().flatten().tolist())


# volumes


def _rooted(world: int) -> Fraction:
    """Elements that a rank sends on average when one part of P after another has another root (P = 1)."""
    sent = [Fraction(0)] * world
    for root in range(world):  # each rank is the root of 1 / R of the elements; a chain passes them on
        for hop in range(world - 1):
            sent[(root + hop) % world] += Fraction(1, world)
    return sum(sent, Fraction(0)) / world


def _ring_gather(world: int) -> Fraction:
    """A ring all-gather: R - 1 rounds, in each of which every rank passes on one part of P / R."""
    return sum((Fraction(1, world) for _ in range(world - 1)), Fraction(0))


def _owners_volume(world: int, spreads: int) -> float:
    return float(_rooted(world) + spreads * _rooted(world))


def _gather_volume(world: int, spreads: int) -> float:
    return float(spreads * _ring_gather(world) + _ring_gather(world) + _ring_gather(world))


def _padded_part(rows: int, cols: int, world: int) -> int:
    """Cut a real tensor into equal parts, with zeros behind the last row, and measure one."""
    matrix = torch.ones(rows, cols)
    while matrix.shape[0] % world:
        matrix = torch.cat([matrix, torch.zeros(1, cols)])
    return matrix.chunk(world)[0].numel()


def _owner_payload(world: int, w: int, g: int, k: int, free: bool) -> list[int]:
    found = 0
    for rows, cols in SHAPES:
        found += rows * cols * g
        for _ in range(k):
            found += rows * cols * w * (2 if free else 1)
    return [found] * world


def _gather_payload(world: int, w: int, g: int, k: int, free: bool) -> list[int]:
    parts = sum(_padded_part(r, c, world) for r, c in SHAPES)
    spreads = k * (2 if free else 1)
    return [spreads * parts * w + world * parts * g + parts * g] * world


def _library_payload(kind: str, world: int, w: int, g: int, k: int, free: bool) -> list[int]:
    mode = f"{kind}-{'free' if free else 'keep'}"
    sizes = Sizes(weight=w, gradient=g, micro_batches=k)
    return [sum(p.values()) for p in step_payload(mode, _plan(SHAPES, world), sizes)]  # type: ignore[arg-type]


# balance


def _bound(shapes: Shapes, world: int) -> float:
    costs = []
    for shape in shapes:
        m, n = min(shape), max(shape)
        costs.append(20.0 * m * m * n + 10.0 * m**3)
    return max(*costs, sum(costs) / world)


def _lpt_worst(world: int) -> float:
    """Fullest owner over the best possible one for the jobs 2R-1, 2R-1, ..., R+1, R+1, R, R, R.

    3 R is best: 2R-1 beside R+1, 2R-2 beside R+2 and so on, and the last three together.
    """
    times = [t for t in range(2 * world - 1, world, -1) for _ in range(2)] + [world] * 3
    kinds = sorted(set(times))
    curves = tuple(tuple(float(t * k) for k in range(times.count(t) + 1)) for t in kinds)
    problem = Problem(curves, tuple(kinds), world)
    return problem.makespan(lpt(problem)) / (3 * world)


def _saturation(name: str) -> float:
    hw = Hardware()
    costs = []
    for matrix in workload(name):
        m, n = min(matrix.shape), max(matrix.shape)
        flops = min(6 * m * m * n + 14 * m**3, 15 * m * m * n + 5 * m**3)
        costs.append(flops / (hw.symmetric_use * hw.peak_flops))
    return sum(costs) / max(costs)


def _slot(w: int, nodes: int, gpus: int) -> int:
    return ((w % nodes) ^ ((w // gpus) % nodes)) * gpus + w % gpus


# time


def _times(name: str, world: int, gradient_bytes: int) -> list[float]:
    hw, every, elements = Hardware(), 0.0, 0
    for matrix in workload(name):
        m, n = min(matrix.shape), max(matrix.shape)
        every += (20 * m * m * n + 10 * m**3) / (hw.direct_use * hw.peak_flops)
        elements += m * n
    gather = elements * gradient_bytes / hw.node_bytes_per_s if world > hw.gpus_per_node else 0.0
    return [every + gather]


def _owner_time(name: str, world: int) -> float:
    hw = Hardware()
    plan = make_plan(workload(name), world, cost=hw.owned_cost())
    loads, elements = [0.0] * world, [0] * world
    for matrix in plan.matrices:
        m, n, rank = min(matrix.shape), max(matrix.shape), plan.owner(matrix.name)
        loads[rank] += (6 * m * m * n + 14 * m**3) / (hw.symmetric_use * hw.peak_flops)
        elements[rank] += m * n
    return max(loads) + 22 * max(elements) / hw.memory_bytes_per_s + hw.fixed_s


NETWORK = NetworkModel(1e-5, 1e9)


def _exposed(world: int, compute: float) -> float:
    took = [NETWORK.broadcast(2 * rows * cols, world) for rows, cols in SHAPES]
    waited = took[0]
    for seconds in took[1:]:
        waited += seconds - compute if seconds > compute else 0.0
    return waited


EQUATIONS = [
    Equation(
        label="update",
        latex=r"\begin{aligned} \bar g &= \frac1R\sum_{r=1}^{R} g_r, \qquad B \leftarrow \mu B + \bar g, \\ "
        r"W &\leftarrow (1-\eta\lambda)\, W - 0.2\,\eta\sqrt{\max(\text{rows}, \text{cols})}\; "
        r"\mathrm{NS}(\bar g + \mu B) \end{aligned}",
        implemented_by="dist_lib.optim.Muon",
        evaluate=_update,
        library=_muon,
        samples=[(1, 0.02, 0.95, 0.1), (3, 0.01, 0.9, 0.0)],
    ),
    Equation(
        label="volume-owners",
        latex=r"v_{\text{owners}} = (1+u)\,\frac{R-1}{R}",
        implemented_by="dist_lib.dmuon.bytes.wire_share",
        evaluate=_owners_volume,
        library=lambda world, u: float(wire_share("fsdp-free" if u == 2 else "ddp", world)),
        samples=[(1, 1), (2, 1), (4, 1), (8, 2), (3, 2)],
        rtol=0.0,
    ),
    Equation(
        label="volume-gather",
        latex=r"v_{\text{gather}} = (2+u)\,\frac{R-1}{R}",
        implemented_by="dist_lib.dmuon.bytes.wire_share",
        evaluate=_gather_volume,
        library=lambda world, u: float(wire_share("gather-free" if u == 2 else "gather-keep", world)),
        samples=[(1, 1), (2, 1), (4, 1), (8, 2), (3, 2)],
        rtol=0.0,
    ),
    Equation(
        label="payload-owners",
        latex=r"b_{\text{owners}} = P\,g + u\,P\,w, \qquad P = \sum_i \text{rows}_i\,\text{cols}_i",
        implemented_by="dist_lib.dmuon.bytes.step_payload",
        evaluate=_owner_payload,
        library=lambda *sample: _library_payload("fsdp", *sample),
        samples=[(1, 4, 4, 1, False), (3, 2, 4, 1, True), (4, 2, 4, 3, True), (2, 4, 4, 2, False)],
        rtol=0.0,
    ),
    Equation(
        label="payload-gather",
        latex=r"b_{\text{gather}} = u\,S\,w + R\,S\,g + S\,g, \qquad "
        r"S = \sum_i \left\lceil \frac{\text{rows}_i}{R} \right\rceil \text{cols}_i",
        implemented_by="dist_lib.dmuon.bytes.step_payload",
        evaluate=_gather_payload,
        library=lambda *sample: _library_payload("gather", *sample),
        samples=[(1, 4, 4, 1, False), (3, 2, 4, 1, True), (4, 2, 4, 3, True), (2, 4, 4, 2, False)],
        rtol=0.0,
    ),
    Equation(
        label="part",
        latex=r"s(\text{rows}, \text{cols}, R) = \left\lceil \frac{\text{rows}}{R} \right\rceil \text{cols}",
        implemented_by="dist_lib.dmuon.bytes.chunk_elements",
        evaluate=lambda rows, cols, world: _padded_part(rows, cols, world),
        library=lambda rows, cols, world: chunk_elements((rows, cols), world),
        samples=[(8, 6, 4), (5, 7, 2), (1, 9, 4), (7, 3, 3), (6, 2, 1)],
        rtol=0.0,
    ),
    Equation(
        label="bound",
        latex=r"T \;\ge\; \max\left( \max_i c_i,\; \frac1R \sum_i c_i \right)",
        implemented_by="dist_lib.dmuon.plan.OwnerPlan",
        evaluate=_bound,
        library=lambda shapes, world: (
            make_plan(_specs(shapes), world, cost=FlopCost(form="direct", batch=1)).lower_bound
        ),
        samples=[(SHAPES, 1), (SHAPES, 2), (SHAPES, 4), (((64, 64), (64, 64), (64, 256)), 3)],
        rtol=1e-9,
    ),
    Equation(
        label="lpt",
        latex=r"T_{\text{LPT}} \;\le\; \left( \frac43 - \frac{1}{3R} \right) T_{\text{best}}",
        implemented_by="dist_lib.dmuon.solvers.lpt",
        evaluate=lambda world: 4 / 3 - 1 / (3 * world),
        library=_lpt_worst,
        samples=[(2,), (3,), (5,), (8,)],
        rtol=1e-9,
    ),
    Equation(
        label="saturation",
        latex=r"R_{\text{sat}} = \frac{\sum_i c_i}{\max_i c_i}",
        implemented_by="dist_lib.dmuon.cost_model.saturation_ranks",
        evaluate=_saturation,
        library=lambda name: saturation_ranks(workload(name)),
        samples=[("qwen2.5-7b",), ("wallx",), ("smollm2-135m",)],
        rtol=1e-6,
    ),
    Equation(
        label="layout",
        latex=r"\text{gpu}(w) = w \bmod G, \qquad "
        r"\text{node}(w) = (w \bmod N) \oplus \left( \lfloor w/G \rfloor \bmod N \right)",
        implemented_by="dist_lib.dmuon.layout.rank_of_slot",
        evaluate=_slot,
        library=rank_of_slot,
        samples=[(w, 4, 8) for w in (0, 1, 7, 8, 9, 17, 31, 40)] + [(5, 2, 4), (13, 2, 4)],
        rtol=0.0,
    ),
    Equation(
        label="time-gather",
        latex=r"T_{\text{gather}} = \sum_i \frac{20\,m_i^2 n_i + 10\,m_i^3}{u_d F} + \frac{P\,g}{\beta}",
        implemented_by="dist_lib.dmuon.cost_model.optimizer_times",
        evaluate=_times,
        library=lambda name, world, g: [optimizer_times(name, world, gradient_bytes=g).gathering],
        samples=[("qwen2.5-7b", 8, 2), ("qwen2.5-7b", 256, 2), ("wallx", 256, 4)],
        rtol=1e-9,
    ),
    Equation(
        label="time-owners",
        latex=r"T_{\text{owners}} = \max_r \sum_{i \in \text{own}(r)} \frac{6\,m_i^2 n_i + 14\,m_i^3}{u_s F} "
        r"+ \frac{22\,\max_r P_r}{\beta_{\text{mem}}} + T_{\text{fixed}}",
        implemented_by="dist_lib.dmuon.cost_model.optimizer_times",
        evaluate=_owner_time,
        library=lambda name, world: optimizer_times(name, world).dmuon,
        samples=[("wallx", 8), ("wallx", 256), ("pi0", 32)],
        rtol=1e-6,
    ),
    Equation(
        label="exposed",
        latex=r"T_{\text{exposed}} = t_{\text{publish}}(1) + \sum_{\ell \ge 2} "
        r"\max\left( 0,\; t_{\text{publish}}(\ell) - t_{\text{compute}}(\ell - 1) \right)",
        implemented_by="dist_lib.dmuon.cost_model.exposed_seconds",
        evaluate=_exposed,
        library=lambda world, compute: exposed_seconds(
            _plan(SHAPES, world), [[m.name] for m in _specs(SHAPES)], compute, NETWORK
        ),
        samples=[(2, 0.0), (4, 1.001e-5), (4, 1.0)],
        rtol=1e-9,
    ),
]
