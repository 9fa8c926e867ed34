"""Numbered equations of the chapter on sparse weight sync, each with an evaluation outside the library's own code.

Numbers are rounded to bfloat16 on their 32-bit patterns in plain integers, and counted in loops.
"""

from __future__ import annotations

import math
import struct
from collections import Counter

import torch

from dist_lib.checks import Equation
from dist_lib.pulse import sparsity
from dist_lib.pulse.loco import feedback, gate
from dist_lib.pulse.loco_config import dense_wire_bytes, sparse_wire_bytes
from dist_lib.pulse.loco_loop import nesterov_step
from dist_lib.pulse.sparsity_measures import (
    adam_bound,
    adam_bound_sharp,
    critical_weight,
    crossing_model,
    reference_bits,
    threshold_model,
    ulp,
    visible,
)
from dist_lib.pulse.timing import SyncCost, bandwidth_needed, chain_bytes, join_bytes, sync_seconds, utilisation


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _bits(value: float) -> int:
    """The bfloat16 pattern of a number, rounded to nearest, ties to even."""
    word = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


def _spacing(weight: float) -> float:
    """Distance from a positive or negative bfloat16 number to the next one away from zero."""
    low = _bits(abs(weight)) if _value(_bits(abs(weight))) <= abs(weight) else _bits(abs(weight)) - 1
    return _value(low + 1) - _value(low)


def _value(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def _tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _pair(old: list[float], new: list[float]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"w": _tensor(old).bfloat16()}, {"w": _tensor(new).bfloat16()}


def _entropy(symbols: list[int]) -> float:
    """Bits of all symbols at their own frequencies."""
    return -sum(c * math.log2(c / len(symbols)) for c in Counter(symbols).values())


def _ideal_bits(old: list[float], new: list[float]) -> float:
    pairs = [(_bits(a), _bits(b)) for a, b in zip(old, new, strict=True)]
    by_exponent: dict[int, list[int]] = {}
    for a, b in pairs:
        by_exponent.setdefault((a >> 7) & 255, []).append(int(a != b))
    moves = [b - a for a, b in pairs if a != b]
    return sum(map(_entropy, by_exponent.values())) + _entropy(moves)


def _library_bits(old: list[float], new: list[float]) -> float:
    before, after = _pair(old, new)
    return reference_bits(before["w"], after["w"])


THETA = [0.019, -0.019, 0.0312, 1.0, -3e-5, 0.25, 7e-4, -0.002]
STEP = [3e-5, 9e-5, -7e-5, 2.5e-3, 3e-6, 1e-6, 3e-6, 3e-6]
AFTER = [t - s for t, s in zip(THETA, STEP, strict=True)]


def _largest(b1: float, b2: float) -> float:
    """Largest step over the learning rate, reached by gradients that grow as (b1 / b2)^-j; many steps, float64."""
    m = v = 0.0
    ratio = b1 / b2
    for j in range(2999, -1, -1):
        g = ratio**j
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return m / math.sqrt(v)


def _busy_share(nbytes: float, rate: float, compute: float) -> float:
    """One less the share of waiting, with the transfer cut into a thousand parts."""
    bits, seconds = 8 * nbytes, 0.0
    for _ in range(1000):
        seconds += bits / rate / 1000
    return 1 - seconds / (compute + seconds)


def _bandwidth_by_search(nbytes: float, compute: float, share: float, rest: float) -> float:
    low, high = 1.0, 1e15
    for _ in range(200):
        middle = (low * high) ** 0.5
        busy = compute / (compute + 8 * nbytes / middle + rest)
        low, high = (middle, high) if busy < share else (low, middle)
    return low


def _worst_join(anchor: float, patch: float, every: int) -> float:
    """The dearest of all moments to join, version by version."""
    return max(anchor + (version % every) * patch for version in range(3 * every))


def _split_by_hand(theta: list[float], s: list[float]) -> list[list[float]]:
    sent = [u if _bits(t) != _bits(_float32(_float32(t) - _float32(u))) else 0.0 for t, u in zip(theta, s, strict=True)]
    return [sent, [u - v for u, v in zip(s, sent, strict=True)]]


def _split_by_library(theta: list[float], s: list[float]) -> list[list[float]]:
    sent, kept = feedback(_tensor(s), gate(_tensor(theta), _tensor(s)))
    return [sent.tolist(), kept.tolist()]


def _unsent(theta: list[float], s: list[float], rounds: int) -> list[float]:
    """Everything that was sent in some rounds of equal updates from fixed weights, plus the last buffer."""
    total, kept = torch.zeros(len(s)), torch.zeros(len(s))
    for _ in range(rounds):
        wanted = _tensor(s) + kept
        sent, kept = feedback(wanted, gate(_tensor(theta), wanted))
        total += sent
    return [float(v) for v in (total + kept).tolist()]


def _outer_by_hand(theta: float, momentum: float, g: list[float]) -> list[float]:
    for x in g:
        momentum = 0.9 * momentum + x
        theta = theta - 0.7 * (x + 0.9 * momentum)
    return [theta, momentum]


def _outer_by_library(theta: float, momentum: float, g: list[float]) -> list[float]:
    t, m = _tensor([theta]), _tensor([momentum])
    for x in g:
        nesterov_step(t, m, _tensor([x]), lr=0.7, mu=0.9)
    return [float(t), float(m)]


EQUATIONS = [
    Equation(
        label="sparsity",
        latex=(
            r"S_k = \frac1d\, \#\{\, i : \mathrm{cast}(\theta_{t+k,i}) = \mathrm{cast}(\theta_{t,i}) "
            r"\text{ bit for bit}\,\}"
        ),
        implemented_by="dist_lib.pulse.sparsity",
        evaluate=lambda old, new: sum(_bits(a) == _bits(b) for a, b in zip(old, new, strict=True)) / len(old),
        library=lambda old, new: sparsity(*_pair(old, new)),
        samples=[(THETA, AFTER), ([0.0, 1.0, 2.0], [-0.0, 1.0, 2.0])],
        rtol=1e-12,
    ),
    Equation(
        label="visible",
        latex=r"G(\theta, s) = \{\, i : \mathrm{cast}(\theta_i) \neq \mathrm{cast}(\theta_i - s_i)\,\}",
        implemented_by="dist_lib.pulse.sparsity_measures.visible",
        evaluate=lambda theta, s: [
            float(_bits(t) != _bits(_float32(t) - _float32(u))) for t, u in zip(theta, s, strict=True)
        ],
        library=lambda theta, s: visible(_tensor(theta), _tensor(s)).tolist(),
        samples=[(THETA, STEP)],
        rtol=0.0,
    ),
    Equation(
        label="spacing",
        latex=r"\mathrm{ulp}(w) = 2^{e-7} \quad\text{for}\quad 2^e \le |w| < 2^{e+1}",
        implemented_by="dist_lib.pulse.sparsity_measures.ulp",
        evaluate=lambda w: [_spacing(x) for x in w],
        library=lambda w: ulp(_tensor(w)).tolist(),
        samples=[(THETA,), ([1e-30, 65536.0, 3.0],)],
        rtol=1e-7,
    ),
    Equation(
        label="critical",
        latex=r"|w| < 256\, |u|",
        implemented_by="dist_lib.pulse.sparsity_measures.critical_weight",
        evaluate=lambda u: 2**8 * u,
        library=critical_weight,
        samples=[(3e-6,), (3e-5,)],
        rtol=1e-12,
    ),
    Equation(
        label="threshold",
        latex=r"S_1 = \frac1d \sum_i \Big[\, |u_i| \le \tfrac12\, \mathrm{ulp}(w_i) \,\Big]",
        implemented_by="dist_lib.pulse.sparsity_measures.threshold_model",
        evaluate=lambda u, w: sum(abs(a) <= _spacing(b) / 2 for a, b in zip(u, w, strict=True)) / len(w),
        library=lambda u, w: threshold_model(_tensor(u), _tensor(w)),
        samples=[(STEP, THETA)],
        rtol=1e-12,
    ),
    Equation(
        label="crossing",
        latex=r"S_1 = 1 - \frac1d \sum_i \min\!\Big(1,\; \frac{|u_i|}{\mathrm{ulp}(w_i)}\Big)",
        implemented_by="dist_lib.pulse.sparsity_measures.crossing_model",
        evaluate=lambda u, w: 1 - sum(min(1.0, abs(a) / _spacing(b)) for a, b in zip(u, w, strict=True)) / len(w),
        library=lambda u, w: crossing_model(_tensor(u), _tensor(w)),
        samples=[(STEP, THETA)],
    ),
    Equation(
        label="adam-bound",
        latex=r"\frac{|u|}{\eta} \le \sqrt{\frac{1-\beta_1}{1-\beta_2}}",
        implemented_by="dist_lib.pulse.sparsity_measures.adam_bound",
        evaluate=lambda b1, b2: math.exp(0.5 * (math.log1p(-b1) - math.log1p(-b2))),
        library=adam_bound,
        samples=[(0.9, 0.999), (0.9, 0.95)],
        rtol=1e-9,
    ),
    Equation(
        label="adam-bound-sharp",
        latex=r"\sup \frac{|u|}{\eta} = \frac{1-\beta_1}{\sqrt{(1-\beta_2)\,(1-\beta_1^2/\beta_2)}}",
        implemented_by="dist_lib.pulse.sparsity_measures.adam_bound_sharp",
        evaluate=_largest,
        library=adam_bound_sharp,
        samples=[(0.9, 0.999), (0.9, 0.95)],
        rtol=1e-3,
    ),
    Equation(
        label="reference",
        latex=r"H = \sum_e n_e\, h\!\Big(\frac{c_e}{n_e}\Big) + H(\delta), \qquad h(p) = -p\log_2 p - (1-p)\log_2(1-p)",
        implemented_by="dist_lib.pulse.sparsity_measures.reference_bits",
        evaluate=_ideal_bits,
        library=_library_bits,
        samples=[(THETA * 3 + [0.02, 0.3, 0.021], AFTER * 3 + [0.03, 0.3, 0.021])],
        rtol=1e-9,
    ),
    Equation(
        label="utilisation",
        latex=r"U = \frac{T_c}{T_c + T_{\text{sync}}}, \qquad T_{\text{sync}} = \frac{8\,b}{B} + T_{\text{rest}}",
        implemented_by="dist_lib.pulse.timing.utilisation",
        evaluate=_busy_share,
        library=lambda b, rate, compute: utilisation(compute, sync_seconds(b, rate)),
        samples=[(14e9, 20e9, 50.4), (140e6, 0.2e9, 50.4), (108e6, 1e8, 10.0)],
        rtol=1e-9,
    ),
    Equation(
        label="bandwidth",
        latex=r"B = \frac{8\,b\,U}{(1-U)\,T_c - U\,T_{\text{rest}}}",
        implemented_by="dist_lib.pulse.timing.bandwidth_needed",
        evaluate=_bandwidth_by_search,
        library=lambda b, compute, share, rest: bandwidth_needed(b, compute, share, cost=SyncCost(verify_s=rest)),
        samples=[(14e9, 50.4, 0.9, 0.0), (140e6, 50.4, 0.9, 0.9)],
        rtol=1e-6,
    ),
    Equation(
        label="join",
        latex=r"b_{\text{join}} \le b_{\text{anchor}} + (N-1)\, b_{\text{patch}}",
        implemented_by="dist_lib.pulse.timing.join_bytes",
        evaluate=_worst_join,
        library=join_bytes,
        samples=[(100.0, 3.0, 1), (15.2e9, 108e6, 30)],
        rtol=1e-12,
    ),
    Equation(
        label="chain",
        latex=r"b_{\text{chain}} = c\, d \sum_{j=1}^{k} (1 - S_1^{(j)}) \;\ge\; b_{\text{merged}} = c\, d\, (1 - S_k)",
        implemented_by="dist_lib.pulse.timing.chain_bytes",
        evaluate=lambda densities, cells, each: math.fsum(each * round(cells * r) for r in densities),
        library=chain_bytes,
        samples=[([0.01, 0.02, 0.015], 10_000, 3.0)],
        rtol=1e-9,
    ),
    Equation(
        label="gate",
        latex=(
            r"s = (\theta - w) + e, \quad "
            r"V = \{\, i : \mathrm{cast}(\theta_i) \neq \mathrm{cast}(\theta_i - s_i)\,\}, "
            r"\quad e_V \leftarrow 0, \;\; e_{\bar V} \leftarrow s_{\bar V}"
        ),
        implemented_by="dist_lib.pulse.loco.feedback",
        evaluate=_split_by_hand,
        library=_split_by_library,
        samples=[(THETA, STEP)],
        rtol=1e-6,
    ),
    Equation(
        label="conservation",
        latex=r"\sum_{t} \text{sent}_t + e_{\text{last}} = \sum_t (\theta_t - w_t)",
        implemented_by="dist_lib.pulse.loco.feedback",
        evaluate=lambda theta, s, rounds: [rounds * u for u in s],
        library=_unsent,
        samples=[(THETA, STEP, 9)],
        rtol=1e-6,
    ),
    Equation(
        label="outer",
        latex=(
            r"g = \frac1R \sum_{r=1}^{R} \text{sent}^{(r)}, \qquad M \leftarrow \mu M + g, "
            r"\qquad \theta \leftarrow \theta - \alpha\,(g + \mu M)"
        ),
        implemented_by="dist_lib.pulse.loco_loop.nesterov_step",
        evaluate=_outer_by_hand,
        library=_outer_by_library,
        samples=[(0.5, 0.1, [0.2, -0.3, 0.05]), (-1.0, 0.0, [1.0])],
        rtol=1e-6,
    ),
    Equation(
        label="wire",
        latex=(
            r"\frac{b_{\text{dense}}}{b_{\text{sparse}}} \approx "
            r"\frac{2\,(R-1)/R \cdot 4d}{(R-1)\, p} = \frac{2}{R}\cdot\frac{4d}{p}"
        ),
        implemented_by="dist_lib.pulse.loco_config.sparse_wire_bytes",
        evaluate=lambda d, p, r: 2 / r * 4 * d / p,
        library=lambda d, p, r: dense_wire_bytes(d, r, digest=False) / (sparse_wire_bytes(p, r, digest=False)),
        samples=[(10**8, 10**7, 2), (10**8, 3 * 10**7, 4)],
        rtol=1e-4,
    ),
]
