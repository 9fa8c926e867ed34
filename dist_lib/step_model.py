"""A training step in seconds and bytes, from a model small enough to read.

One step of pipeline- and data-parallel training is drawn as segments on lanes: forward and backward of every
micro-batch on every stage, gradients on the network, the optimizer, and new weights on the link to a sampler. The five
:data:`METHODS` differ in what one paper each changes; everything else stays as in the synchronous baseline.

It is a model, not a measurement. FLOPs come from :mod:`dist_lib.models`, transfer times from
:class:`~dist_lib.comm.NetworkModel`, and the rates of :class:`Scenario` are assumptions. Stages are balanced,
activations travel between stages in no time, and nothing overlaps unless a method says so. No simulator of hardware.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dist_lib.comm import NetworkModel
from dist_lib.models import DecoderConfig, get_config, parameter_counts, training_flops
from dist_lib.ops import newton_schulz_flops

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "baseline": "Synchronous, AdamW",
        "muon": "Muon on every rank",
        "dmuon": "DMuon",
        "agoq": "AGoQ",
        "async": "One-step delay",
        "pulse": "PULSE",
    }
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, on what.

    Attributes:
        model: name of a :data:`~dist_lib.models.CONFIGS` entry.
        stages: pipeline stages, each holding an equal share of the model.
        replicas: data-parallel copies of the pipeline.
        micro_batches: micro-batches in a step and replica.
        seq_len: tokens in a micro-batch (one sequence).
        flops_per_s: what a device sustains in matrix products.
        memory_bytes_per_s: what a device sustains reading and writing its memory.
        network: between replicas, one link a device.
        sampler_link: from the trainer to a machine that generates text with the new weights.
        changed_share: share of BF16 weights whose bits change in a step.
        block_size: elements that share one float32 scale in quantised tensors.
    """

    model: str = "llama2-7b"
    stages: int = 4
    replicas: int = 8
    micro_batches: int = 8
    seq_len: int = 4096
    flops_per_s: float = 400e12
    memory_bytes_per_s: float = 3e12
    network: NetworkModel = field(default_factory=lambda: NetworkModel(20e-6, 50e9))
    sampler_link: NetworkModel = field(default_factory=lambda: NetworkModel(1e-3, 12.5e9))
    changed_share: float = 0.01
    block_size: int = 128

    def __post_init__(self) -> None:
        if min(self.stages, self.replicas, self.micro_batches, self.seq_len, self.block_size) < 1:
            raise ValueError("stages, replicas, micro_batches, seq_len and block_size must be at least 1")
        if self.micro_batches < self.stages:
            raise ValueError(f"{self.micro_batches} micro-batches on {self.stages} stages: need one a stage or more")
        if not (self.flops_per_s > 0 and self.memory_bytes_per_s > 0 and 0 < self.changed_share < 1):
            raise ValueError("rates must be above 0 and changed_share between 0 and 1")

    @property
    def config(self) -> DecoderConfig:
        """The model's shape."""
        return get_config(self.model)

    @property
    def stage_parameters(self) -> float:
        """Parameters on one device."""
        return parameter_counts(self.config).total / self.stages

    @property
    def stage_matrices(self) -> float:
        """Those of them that Muon takes."""
        return parameter_counts(self.config).matrices / self.stages

    @property
    def forward_s(self) -> float:
        """Seconds of one micro-batch's forward pass on one stage."""
        return training_flops(self.config, 1, self.seq_len).forward / self.stages / self.flops_per_s

    @property
    def backward_s(self) -> float:
        """Seconds of one micro-batch's backward pass on one stage."""
        return training_flops(self.config, 1, self.seq_len).backward / self.stages / self.flops_per_s


@dataclass(frozen=True)
class Segment:
    """Something that occupies a lane: ``kind`` is forward, stale, backward, optimizer, communication or idle."""

    lane: str
    start: float
    seconds: float
    kind: str
    label: str

    @property
    def end(self) -> float:
        """When it is over."""
        return self.start + self.seconds


@dataclass(frozen=True)
class StepTimeline:
    """One step of one method.

    Attributes:
        segments: in order of start.
        step_s: time from this step's start to the next one's.
        sampler_s: time from this step's start until the sampler holds its weights.
    """

    method: str
    segments: tuple[Segment, ...]
    step_s: float
    sampler_s: float

    def share(self, kind: str) -> float:
        """Share of the devices' time in a step that is spent on ``kind``; lanes of links are left out."""
        lanes = {s.lane for s in self.segments if s.lane.startswith("stage")}
        spent = sum(s.seconds for s in self.segments if s.kind == kind and s.lane in lanes)
        return spent / (self.step_s * len(lanes))


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step for one device (weights to the sampler: for the whole model).

    Attributes:
        gradients: sent for the reduction over replicas.
        published: sent to spread updated weights over replicas.
        sampler: the message to the sampler.
        activations: held for backward on the first stage, at most.
        second_weights: held for a second version of the weights.
    """

    gradients: float
    published: float
    sampler: float
    activations: float
    second_weights: float


def check_method(method: str) -> None:
    """Raise ``ValueError`` for a method that is not in :data:`METHODS`."""
    if method not in METHODS:
        raise ValueError(f"method {method!r}: allowed are {', '.join(METHODS)}")


def one_forward_one_backward(
    stages: int, micro_batches: int, forward_s: float, backward_s: float, *, version: int | None = None
) -> list[Segment]:
    """Schedule micro-batches through a pipeline in 1F1B order, each as early as its inputs allow.

    Args:
        stages: number of stages; lanes are called ``stage 1`` and so on.
        micro_batches: how many; more than one step's worth gives the schedule without a flush.
        forward_s: seconds of a forward pass on a stage.
        backward_s: seconds of a backward pass on a stage.
        version: micro-batches from this number on are marked ``stale`` (None: none is).
    """
    orders = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, micro_batches)
        order = [("forward", j) for j in range(warm)]
        for j in range(micro_batches - warm):
            order += [("forward", warm + j), ("backward", j)]
        orders.append(order + [("backward", j) for j in range(micro_batches - warm, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    free, position, segments = [0.0] * stages, [0] * stages, []
    while any(position[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, j = orders[stage][position[stage]]
                needed = _inputs(kind, stage, j, stages)
                if needed is not None and needed not in done:
                    break
                start = max(free[stage], done[needed] if needed is not None else 0.0)
                seconds = forward_s if kind == "forward" else backward_s
                shown = "stale" if kind == "forward" and version is not None and j >= version else kind
                segments.append(Segment(f"stage {stage + 1}", start, seconds, shown, f"{kind} {j + 1}"))
                free[stage] = done[kind, stage, j] = start + seconds
                position[stage] += 1
    return segments


def _inputs(kind: str, stage: int, j: int, stages: int) -> tuple[str, int, int] | None:
    if kind == "forward":
        return ("forward", stage - 1, j) if stage else None
    return ("backward", stage + 1, j) if stage < stages - 1 else ("forward", stage, j)


def newton_schulz_flops_of_model(config: DecoderConfig) -> int:
    """FLOPs of one five-step orthogonalisation, in the direct form, of every hidden matrix of a model."""
    d, kv, ff = config.d_model, config.kv_dim, config.d_ff
    shapes = [(d, d)] * 2 + [(kv, d)] * 2 + [(ff, d)] * 3
    return config.n_layers * sum(newton_schulz_flops(rows, cols) for rows, cols in shapes)


def patch_bytes(weights: float, changed_share: float) -> float:
    """Bytes of a patch that names and overwrites the changed BF16 weights.

    Two bytes a changed value, and for the positions the entropy of a random mask: no code for independent positions is
    shorter.
    """
    p = changed_share
    mask_bits = -(p * math.log2(p) + (1 - p) * math.log2(1 - p))
    return weights * (2 * p + mask_bits / 8)


def activation_layer_units(config: DecoderConfig, *, quantised_bits: float | None = None) -> float:
    """What a layer holds for backward, in units of one BF16 hidden tensor (AGoQ, table 1, for any shape).

    Args:
        config: the model's shape.
        quantised_bits: bits a stored element where AGoQ quantises, scales included; None for plain BF16.
    """
    ratio, kv = config.d_ff / config.d_model, config.kv_dim / config.d_model
    if quantised_bits is None:
        return 9 + 3 * kv + 4 * ratio
    return 2 + 3 * kv + quantised_bits / 16 * (3 + 2 * ratio)


def step_bytes(method: str, scenario: Scenario) -> StepBytes:
    """Bytes of one step.

    Raises:
        ValueError: an unknown method.
    """
    check_method(method)
    s, network = scenario, scenario.network
    parameters, matrices = s.stage_parameters, s.stage_matrices
    gradient_bytes, published = 4.0, 0.0
    if method == "agoq":
        gradient_bytes = 1 + 4 / s.block_size
    gradients = float(network.wire_bytes("all_reduce", round(gradient_bytes * parameters), s.replicas))
    if method == "dmuon":
        rest = float(network.wire_bytes("all_reduce", round(4 * (parameters - matrices)), s.replicas))
        gradients = rest + float(network.wire_bytes("reduce", round(4 * matrices), s.replicas))
        published = float(network.wire_bytes("broadcast", round(2 * matrices), s.replicas))
    weights = s.stage_parameters * s.stages
    bits = 4 + 32 / s.block_size if method == "agoq" else None
    hidden = 2 * s.seq_len * s.config.d_model
    layers = s.config.n_layers / s.stages
    return StepBytes(
        gradients=gradients,
        published=published,
        sampler=patch_bytes(weights, s.changed_share) if method == "pulse" else 2 * weights,
        activations=s.stages * layers * activation_layer_units(s.config, quantised_bits=bits) * hidden,
        second_weights=2 * parameters if method == "async" else 0.0,
    )


def _update_s(method: str, s: Scenario) -> float:
    """Seconds of the optimizer on one device: AdamW moves bytes, Muon multiplies matrices as well."""
    adamw, muon = 30, 22  # bytes touched a parameter: gradient, master, moments or momentum, BF16 weight
    if method not in ("muon", "dmuon"):
        return adamw * s.stage_parameters / s.memory_bytes_per_s
    rest = adamw * (s.stage_parameters - s.stage_matrices) / s.memory_bytes_per_s
    hidden = muon * s.stage_matrices / s.memory_bytes_per_s
    hidden += newton_schulz_flops_of_model(s.config) / s.stages / s.flops_per_s
    return rest + hidden / (s.replicas if method == "dmuon" else 1)


def _idle(segments: list[Segment], stages: int, start: float, end: float) -> list[Segment]:
    found = []
    for stage in range(1, stages + 1):
        at = start
        for segment in sorted((x for x in segments if x.lane == f"stage {stage}"), key=lambda x: x.start):
            if segment.start - at > 1e-9:
                found.append(Segment(segment.lane, at, segment.start - at, "idle", "waits"))
            at = max(at, segment.end)
        if end - at > 1e-9:
            found.append(Segment(f"stage {stage}", at, end - at, "idle", "waits"))
    return found


def timeline(method: str, scenario: Scenario) -> StepTimeline:
    """Lay one step of ``method`` out in time.

    Raises:
        ValueError: an unknown method.
    """
    moved, s = step_bytes(method, scenario), scenario
    reduce_s = moved.gradients / s.network.bandwidth_bytes_per_s + 2 * (s.replicas - 1) * s.network.latency_s
    publish_s = moved.published / s.network.bandwidth_bytes_per_s
    update_s, send_s = _update_s(method, s), s.sampler_link.p2p(round(moved.sampler))
    if method == "async":
        segments, step_s = _without_flush(s, reduce_s, update_s)
        ready = step_s
    else:
        segments = one_forward_one_backward(s.stages, s.micro_batches, s.forward_s, s.backward_s)
        flushed = max(x.end for x in segments)
        segments.append(Segment("network", flushed, reduce_s, "communication", "gradients"))
        at = flushed + reduce_s
        segments += [Segment(f"stage {k + 1}", at, update_s, "optimizer", "update") for k in range(s.stages)]
        step_s = ready = at + update_s + publish_s
        if publish_s:
            segments.append(Segment("network", at + update_s, publish_s, "communication", "owners publish weights"))
    segments += _idle(segments, s.stages, 0.0, step_s)
    segments.append(Segment("to sampler", ready, send_s, "communication", "weights to the sampler"))
    return StepTimeline(method, tuple(sorted(segments, key=lambda x: (x.start, x.lane))), step_s, ready + send_s)


def _without_flush(s: Scenario, reduce_s: float, update_s: float) -> tuple[list[Segment], float]:
    """One period of 1F1B that never drains: gradients travel while the next batch is computed on older weights."""
    batches, m = 6, s.micro_batches
    every = one_forward_one_backward(s.stages, batches * m, s.forward_s, s.backward_s)
    start = 3 * m * (s.forward_s + s.backward_s)  # three batches in: warm-up is long over
    period = m * (s.forward_s + s.backward_s) + update_s
    segments = []
    for stage in range(1, s.stages + 1):
        lane = f"stage {stage}"
        segments.append(Segment(lane, 0.0, update_s, "optimizer", "update from the batch before"))
        for x in every:
            begin, end = max(x.start, start), min(x.end, start + period - update_s)
            if x.lane == lane and end - begin > 1e-9:
                kind = "stale" if x.kind == "forward" else x.kind
                label = f"{x.kind}, on weights that are one update old"
                segments.append(Segment(lane, begin - start + update_s, end - begin, kind, label))
    segments.append(Segment("network", 0.0, reduce_s, "communication", "gradients of the batch before"))
    return segments, period
