"""Encoding whatever autograd saves, by module."""

import pytest
import torch
from torch import nn

from dist_lib.agoq import Format
from dist_lib.agoq.hooks import QuantizedSavedTensors
from dist_lib.models import Decoder, DecoderConfig, SavedTensorCounter
from dist_lib.ops import quantize, quantized_nbytes

SMALL = DecoderConfig(
    vocab_size=64, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=160, max_seq_len=64,
    rope_theta=1e4, norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip
SPARED = {"*.self_attn": None, "layers.*": Format("fp4", 32)}


def _gradient(model, policy=None):
    g = torch.Generator().manual_seed(0)
    batch = [torch.randint(0, 64, (2, 24), generator=g) for _ in range(2)]
    model.zero_grad()
    if policy is None:
        model.loss(*batch).backward()
    else:
        with QuantizedSavedTensors(model, policy) as context:
            loss = model.loss(*batch)
        loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradient if policy is None else (gradient, context)


def test_gradients_are_close_and_more_tensors_cost_more():
    model = Decoder(SMALL)
    exact = _gradient(model)

    def error(policy):
        return float((_gradient(model, policy)[0] - exact).norm() / exact.norm())

    spared, all_of_it = error(SPARED), error({"layers.*": Format("fp4", 32)})
    assert 0.001 < spared < all_of_it < 0.5
    assert error({"*": Format("int8", 32)}) < spared
    assert error({"*": None}) == 0 and error({"nothing": Format()}) == 0


def test_modules_are_told_apart_and_names_are_innermost():
    _, context = _gradient(Decoder(SMALL), SPARED)
    names = {name for name, _, _ in context.stored}
    assert "layers.0.self_attn.q_proj" in names and "layers.1.mlp" in names and "layers.0.input_layernorm" in names
    assert not {n for n in names if n.endswith("self_attn")} and not [n for n in names if n in ("norm", "lm_head")]
    assert not {n for n in names if n.endswith(("k_proj", "v_proj", "up_proj"))}  # shared with q_proj and gate_proj


def test_bytes_and_values():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    hidden = model[0](x)
    with QuantizedSavedTensors(model, {"1": Format("nf4", 32)}) as context:
        out = model(x)
    assert [(n, s) for n, s, _ in context.stored] == [("1", (32, 64))]
    assert context.bytes == quantized_nbytes((32, 64), "nf4", 32)
    out.sum().backward()
    expected = quantize(hidden, "nf4", 32).dequantize().sum(0)
    torch.testing.assert_close(model[1].weight.grad[0], expected, rtol=1e-6, atol=1e-6)


def test_a_tensor_changed_in_place_is_not_taken_for_its_former_self():
    class Twice(nn.Module):
        def forward(self, x):
            a = (x * 1.0).exp()
            first = (a * a).sum()
            with torch.no_grad():
                a.mul_(0.0)
            return first + (a * a).sum()

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).mul_(0.3).requires_grad_()
    model = Twice()
    with QuantizedSavedTensors(model, {"": Format("int8", 32)}) as context:
        out = model(x)
    out.backward()
    assert len(context.stored) == 2
    torch.testing.assert_close(x.grad, 2 * torch.exp(2 * x.detach()), rtol=0.05, atol=0.05)


def test_hooks_are_removed_also_after_an_error():
    model = Decoder(SMALL)
    with pytest.raises(ValueError, match="tokens"), QuantizedSavedTensors(model, SPARED):
        model(torch.zeros(3, dtype=torch.long))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with SavedTensorCounter(model) as counter:
        model(torch.zeros(1, 8, dtype=torch.long))
    assert counter.bytes > 0
