"""Cutting a decoder into stages: consecutive layers, the embedding before the first, norm and head after the last.

A stage is any ``nn.Module`` that takes one tensor and returns one; this module makes such modules from
:class:`~dist_lib.models.Decoder` and says which weights two of them share. It moves nothing between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dist_lib.models import Decoder, DecoderConfig
from dist_lib.models.decoder import rotary_table


@dataclass(frozen=True)
class Tie:
    """One weight that two stages hold, each its own copy.

    Trainers add the two gradients before the update, so that the copies stay equal; for the global norm the sum counts
    once, with the first stage.

    Attributes:
        first, last: indices of the two stages, first < last.
        first_name, last_name: its parameter name in each.
    """

    first: int
    first_name: str
    last: int
    last_name: str


class DecoderStage(nn.Module):
    """Consecutive layers of a decoder; parameters keep the names they have in the whole.

    Args:
        decoder: the whole; its modules are shared, not copied.
        stage: index of this stage.
        stages: number of stages.
        layers: indices of the decoder's layers that belong to this stage.

    Attributes:
        ties: weights that this decoder's stages share; equal on all its stages.
    """

    def __init__(self, decoder: Decoder, stage: int, stages: int, layers: range) -> None:
        super().__init__()
        self.config = decoder.config
        self.stage, self.stages = stage, stages
        self.ties = decoder_ties(decoder.config, stages)
        if stage == 0:
            self.embed_tokens = decoder.embed_tokens
        self.layers = nn.ModuleDict({str(index): decoder.layers[index] for index in layers})
        if stage == stages - 1:
            self.norm = decoder.norm
            self.lm_head = decoder.lm_head
            if self.ties:  # a copy of its own, as in another process
                head = nn.Linear(decoder.config.d_model, decoder.config.vocab_size, bias=False, device="meta")
                head.weight = nn.Parameter(decoder.lm_head.weight.detach().clone())
                self.lm_head = head

    def forward(self, x: Tensor) -> Tensor:
        """First stage: tokens (B, S) int64; others: (B, S, D). Last stage: logits (B, S, V); others: (B, S, D).

        Raises:
            ValueError: a sequence longer than ``max_seq_len``.
        """
        if x.shape[1] > self.config.max_seq_len:
            raise ValueError(f"a sequence of {x.shape[1]} tokens; at most {self.config.max_seq_len} are allowed")
        cos, sin = rotary_table(self.config, x.shape[1], x.device)
        if self.stage == 0:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.stage == self.stages - 1:
            x = self.lm_head(self.norm(x))
        return x


def decoder_ties(config: DecoderConfig, stages: int) -> tuple[Tie, ...]:
    """Weights that the stages of a decoder share: the tied embedding, if there is one and more than one stage."""
    if not config.tie_embeddings or stages == 1:
        return ()
    return (Tie(0, "embed_tokens.weight", stages - 1, "lm_head.weight"),)


def ties_of(stages: Iterable[nn.Module]) -> tuple[Tie, ...]:
    """Weights that some stages share, as the first of them with an attribute ``ties`` says; else none."""
    for module in stages:
        ties: tuple[Tie, ...] | None = getattr(module, "ties", None)
        if ties is not None:
            return ties
    return ()


def split_layers(n_layers: int, stages: int) -> list[int]:
    """Number of layers of each stage: as equal as can be, earlier stages take the rest because the last has the head.

    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    if stages < 1 or n_layers < stages:
        raise ValueError(f"{n_layers} layers cannot be cut into {stages} stages; use 1 to {n_layers}")
    return [n_layers // stages + (stage < n_layers % stages) for stage in range(stages)]


def split_decoder(decoder: Decoder, stages: int, *, layers: Sequence[int] | None = None) -> list[nn.Module]:
    """Cut a decoder into modules whose composition is the decoder.

    They share its parameters, so that it sees what they learn; only a tied head, if there are two stages or more,
    becomes a copy of its own (:class:`Tie`), and the decoder's stays tied to the first stage.

    Args:
        decoder: the whole.
        stages: number of stages.
        layers: layers of each stage; default :func:`~dist_lib.async_pipeline.stages.split_layers`.

    Raises:
        ValueError: fewer layers than stages, or counts that do not add up to the decoder's.
    """
    counts = split_layers(decoder.config.n_layers, stages) if layers is None else list(layers)
    if len(counts) != stages or sum(counts) != decoder.config.n_layers or min(counts) < 0:
        raise ValueError(
            f"layers = {counts} for {stages} stages; need {stages} counts whose sum is {decoder.config.n_layers}"
        )
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [
        DecoderStage(decoder, stage, stages, range(start, start + count))
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def merge_states(states: Sequence[Mapping[str, Tensor]], config: DecoderConfig) -> dict[str, Tensor]:
    """State dict of the whole decoder from those of its stages, in order; tied weights come from the first stage."""
    merged: dict[str, Tensor] = {}
    for state in states:
        merged.update(state)
    if config.tie_embeddings:
        merged["lm_head.weight"] = merged["embed_tokens.weight"]
    return merged
