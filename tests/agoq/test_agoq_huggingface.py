"""The Llama of transformers with encoded activations, tiny and with random weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from dist_lib.agoq import ActivationPlan, quantize_activations, restore_activations  # noqa: E402
from dist_lib.models import SavedTensorCounter  # noqa: E402


def _llama(attention="sdpa"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _gradient(model, tokens, **arguments):
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, **arguments).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["shared", "paper"])
def test_same_loss_close_gradient_fewer_bytes_and_back(layout, attention):
    model = _llama(attention).train()
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    loss, exact = _gradient(model, tokens, attention_mask=mask)
    with SavedTensorCounter(model) as before:
        model(input_ids=tokens, attention_mask=mask)
    quantize_activations(model, ActivationPlan("fp4", 64, layout=layout))
    loss_q, gradient = _gradient(model, tokens, attention_mask=mask)
    with SavedTensorCounter(model) as after:
        model(input_ids=tokens, attention_mask=mask)
    assert torch.equal(loss, loss_q)
    assert 0.001 < (gradient - exact).norm() / exact.norm() < 0.15
    assert after.bytes < 0.62 * before.bytes
    restore_activations(model)
    assert torch.equal(_gradient(model, tokens, attention_mask=mask)[1], exact)


def test_gradient_checkpointing_and_generation():
    model = _llama().train()
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    plain = model.eval().generate(tokens[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    quantize_activations(model, ActivationPlan("nf4", 64))
    exact = _gradient(model.train(), tokens)[1]
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert torch.equal(_gradient(model, tokens)[1], exact)
    assert torch.equal(model.eval().generate(tokens[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0), plain)
