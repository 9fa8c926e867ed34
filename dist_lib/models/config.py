"""Shapes of decoders by name: from one that trains in seconds to those that the four papers measure.

A :class:`DecoderConfig` is numbers only. Published shapes come from the models' public configuration files. Two
families are not quite this decoder and only their matrices are the published ones: Qwen2.5 also has biases on queries,
keys and values, and OLMo's norms have no weights. Those shapes serve to plan and to count, not to load the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a LLaMA-style decoder.

    Attributes:
        vocab_size: number of tokens.
        d_model: width of the residual stream; a multiple of ``n_heads``.
        n_layers: number of decoder layers.
        n_heads: query heads; a multiple of ``n_kv_heads``.
        n_kv_heads: key and value heads (grouped-query attention if fewer than ``n_heads``).
        d_ff: width of the SwiGLU MLP.
        max_seq_len: longest sequence that the rotary table covers.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: whether the output head is the embedding's weight.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_seq_len")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def kv_dim(self) -> int:
        """Width of the keys (and of the values) of all heads."""
        return self.n_kv_heads * self.head_dim


def _llama(
    d: int,
    layers: int,
    heads: int,
    kv: int,
    ff: int,
    *,
    vocab: int = 32_000,
    seq: int = 4096,
    theta: float = 10_000.0,
    tied: bool = False,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        d_model=d,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv,
        d_ff=ff,
        max_seq_len=seq,
        rope_theta=theta,
        tie_embeddings=tied,
    )


CONFIGS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "tiny-0.3m": _llama(96, 3, 4, 2, 256, vocab=256, seq=256, tied=True),
        "small-1m": _llama(128, 5, 4, 2, 384, vocab=256, seq=512, tied=True),
        "small-4m": _llama(256, 6, 8, 4, 640, vocab=256, seq=512, tied=True),
        "smollm2-135m": _llama(576, 30, 9, 3, 1536, vocab=49_152, seq=8192, theta=100_000.0, tied=True),
        "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, seq=2048),
        "llama2-7b": _llama(4096, 32, 32, 32, 11_008),
        "llama2-13b": _llama(5120, 40, 40, 40, 13_824),
        "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, vocab=128_256, seq=131_072, theta=500_000.0, tied=True),
        "llama3.2-3b": _llama(3072, 28, 24, 8, 8192, vocab=128_256, seq=131_072, theta=500_000.0, tied=True),
        "olmo-1b": _llama(2048, 16, 16, 16, 8192, vocab=50_304, seq=2048, tied=True),
        "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, vocab=151_936, seq=32_768, theta=1_000_000.0, tied=True),
        "qwen2.5-1.5b": _llama(1536, 28, 12, 2, 8960, vocab=151_936, seq=131_072, theta=1_000_000.0, tied=True),
        "qwen2.5-7b": _llama(3584, 28, 28, 4, 18_944, vocab=152_064, seq=131_072, theta=1_000_000.0),
        "codellama-34b": _llama(8192, 48, 64, 8, 22_016, seq=16_384, theta=1_000_000.0),
        "llama3-8b": _llama(4096, 32, 32, 8, 14_336, vocab=128_256, seq=8192, theta=500_000.0),
    }
)


def get_config(name: str) -> DecoderConfig:
    """Look a configuration up by name.

    Raises:
        KeyError: listing the names that exist.
    """
    if name not in CONFIGS:
        raise KeyError(f"no decoder configuration is named {name!r}; there are {', '.join(CONFIGS)}")
    return CONFIGS[name]
