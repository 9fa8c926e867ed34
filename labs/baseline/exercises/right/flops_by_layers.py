"""Right, written differently: a list of shapes, and a real optimizer on the meta device."""

import torch

from dist_lib.models import Decoder, DecoderConfig


def step_flops(config: DecoderConfig, batch: int, seq: int) -> int:
    d, f, kv = config.d_model, config.d_ff, config.n_kv_heads * config.head_dim
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (d, f), (f, d)] * config.n_layers + [(d, config.vocab_size)]
    linear = sum(6 * batch * seq * m * n for m, n in shapes)
    scores = sum(3 * 2 * 2 * seq * seq * config.head_dim for _ in range(batch * config.n_heads * config.n_layers))
    return linear + scores


def adamw_bytes(config: DecoderConfig) -> int:
    with torch.device("meta"):  # shapes without memory
        model = Decoder(config)
    return sum(4 * p.numel() * torch.finfo(torch.float32).bits // 8 for p in model.parameters())
