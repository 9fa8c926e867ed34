"""Wrong: takes keys and values for full width, forgets attention, and stores a tied head twice."""


def step_flops(config, batch, seq):
    d, tokens = config.d_model, batch * seq
    return 6 * tokens * (config.n_layers * (4 * d * d + 3 * d * config.d_ff) + config.vocab_size * d)


def adamw_bytes(config):
    d = config.d_model
    a_layer = 2 * d * d + 2 * d * config.kv_dim + 3 * d * config.d_ff + 2 * d
    return 16 * (config.n_layers * a_layer + 2 * config.vocab_size * d + d)
