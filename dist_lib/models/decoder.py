"""One small LLaMA-style decoder, used by every chapter: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names are those of Hugging Face's Llama (without the ``model.`` prefix), so real weights load by name.
Shapes in comments: B batch, S sequence, D width, H query heads, K key heads, E = D / H, F MLP width, V vocabulary.
It trains and predicts; it has no cache for generation and no dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_lib.models.config import DecoderConfig


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), dtype kept."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_table(config: DecoderConfig, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (S, E) in float32, the halves repeated."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, heads, S, E) by position; element i is paired with i + E/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, kv = config.d_model, config.kv_dim
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.v_proj = nn.Linear(d, kv, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        out: Tensor = self.o_proj(self.mix(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin))
        return out

    def mix(self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What is between the projections: (B, S, D) and twice (B, S, K E) -> (B, S, D)."""
        c = self.config
        b, s, _ = query.shape
        q = query.view(b, s, c.n_heads, c.head_dim).transpose(1, 2)  # (B, H, S, E)
        k = key.view(b, s, c.n_kv_heads, c.head_dim).transpose(1, 2)  # (B, K, S, E)
        v = value.view(b, s, c.n_kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = c.n_heads // c.n_kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return self.weigh(q, k, v).transpose(1, 2).reshape(b, s, c.d_model)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal softmax attention of each head; all (B, H, S, E)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The whole model: embedding, layers, norm, head.

    Args:
        config: its shape.
        seed: initial weights come from a generator of their own with this seed, so they depend on nothing else.
    """

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's own first fill must not advance the caller's generator
            self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
            self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
            self.norm = RMSNorm(config.d_model, config.norm_eps)
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Normal with deviation 0.02; projections back into the residual stream smaller by sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or parameter.is_meta:
                continue
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * self.config.n_layers) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: (B, S) int64 -> (B, S, V).

        Raises:
            ValueError: a shape other than (B, S), or a sequence longer than ``max_seq_len``.
        """
        if tokens.ndim != 2 or tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}; need (batch, sequence) with a sequence of at most "
                f"{self.config.max_seq_len}"
            )
        cos, sin = rotary_table(self.config, tokens.shape[1], tokens.device)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, in float32; both arguments (B, S) int64."""
        logits = self(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
