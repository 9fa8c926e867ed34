"""Reference solution."""

from dist_lib.models import DecoderConfig


def step_flops(config: DecoderConfig, batch: int, seq: int) -> int:
    d, kv, tokens = config.d_model, config.kv_dim, batch * seq
    projections = 2 * d * d + 2 * d * kv + 3 * d * config.d_ff
    forward = 2 * tokens * (config.n_layers * projections + config.vocab_size * d)
    forward += config.n_layers * 4 * batch * seq * seq * d
    return 3 * forward


def adamw_bytes(config: DecoderConfig) -> int:
    d, layers = config.d_model, config.n_layers
    a_layer = 2 * d * d + 2 * d * config.kv_dim + 3 * d * config.d_ff + 2 * d
    tables = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    return 4 * 4 * (layers * a_layer + tables + d)
