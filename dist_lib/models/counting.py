"""Parameters, FLOPs and bytes of a decoder, from its shape alone.

FLOPs are those of matrix products, one multiply-add counted as two, as torch's ``FlopCounterMode`` counts them;
attention in full, without its causal half. Bytes held for backward are those that autograd saves in eager
mode with float32 activations, as :class:`~dist_lib.models.memory.SavedTensorCounter` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_lib.models.config import DecoderConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by kind; ``head`` is 0 when it is the embedding's weight."""

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        """All parameters, each storage once."""
        return self.embedding + self.attention + self.mlp + self.norm + self.head

    @property
    def matrices(self) -> int:
        """Parameters of the hidden matrices, which Muon would take."""
        return self.attention + self.mlp


def parameter_counts(config: DecoderConfig) -> ParameterCounts:
    """Count parameters: embedding V D, attention 2 D^2 + 2 D KE and MLP 3 D F a layer, norms (2L + 1) D."""
    d, layers = config.d_model, config.n_layers
    table = config.vocab_size * d
    return ParameterCounts(
        embedding=table,
        attention=layers * (2 * d * d + 2 * d * config.kv_dim),
        mlp=layers * 3 * d * config.d_ff,
        norm=(2 * layers + 1) * d,
        head=0 if config.tie_embeddings else table,
    )


@dataclass(frozen=True)
class FlopCounts:
    """FLOPs of one training step by part of the forward pass, and of the backward pass as a whole."""

    projections: int
    attention: int
    head: int
    backward: int

    @property
    def forward(self) -> int:
        """The forward pass."""
        return self.projections + self.attention + self.head

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


def training_flops(config: DecoderConfig, batch: int, seq: int) -> FlopCounts:
    """FLOPs of one step on ``batch`` sequences of ``seq`` tokens.

    Each weight matrix costs 2 FLOPs a parameter and token forward and 4 backward; attention's two products cost
    4 B S^2 D a layer forward and twice that backward. A fused attention kernel that computes the scores again in its
    backward pass spends more than this.

    Raises:
        ValueError: a batch or sequence below 1.
    """
    if batch < 1 or seq < 1:
        raise ValueError(f"batch {batch} and sequence {seq} must be at least 1")
    tokens, counts = batch * seq, parameter_counts(config)
    projections = 2 * tokens * counts.matrices
    head = 2 * tokens * config.vocab_size * config.d_model
    attention = 4 * batch * seq * seq * config.d_model * config.n_layers
    return FlopCounts(projections, attention, head, backward=2 * (projections + attention + head))


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes in memory during a step, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def activation_bytes(config: DecoderConfig, batch: int, seq: int) -> int:
    """Bytes that autograd holds for backward after one float32 forward pass with loss, storages once, no parameters.

    Raises:
        ValueError: a batch or sequence below 1.
    """
    if batch < 1 or seq < 1:
        raise ValueError(f"batch {batch} and sequence {seq} must be at least 1")
    c, tokens = config, batch * seq
    norm = 3 * c.d_model + 1  # its input, the normalised input, its output (a projection's input); 1 / rms
    attention = 4 * c.d_model + c.n_heads  # queries, repeated keys and values, output; log-sum-exp of each row
    mlp = 4 * c.d_ff  # gate, up, silu(gate), their product
    a_token = c.n_layers * (2 * norm + attention + mlp) + norm + c.vocab_size  # last: log-probabilities
    rotary = 2 * seq * c.head_dim
    return 4 * (tokens * a_token + rotary + 1) + 2 * 8 * tokens  # 1: the loss's weight; tokens and targets are int64


def training_bytes(config: DecoderConfig, batch: int, seq: int) -> TrainingBytes:
    """Bytes of one float32 AdamW step: weights, gradients, two moments, and what is held for backward."""
    weights = 4 * parameter_counts(config).total
    return TrainingBytes(weights, weights, 2 * weights, activation_bytes(config, batch, seq))
