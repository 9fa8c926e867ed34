"""Wrong: counts a multiply-add once, and the backward pass not at all."""


def step_flops(config, batch, seq):
    d, tokens = config.d_model, batch * seq
    a_layer = 2 * d * d + 2 * d * config.kv_dim + 3 * d * config.d_ff
    return tokens * (config.n_layers * a_layer + config.vocab_size * d)


def adamw_bytes(config):
    return 0
