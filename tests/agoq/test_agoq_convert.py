"""Whole models with encoded activations: bits of the forward pass, gradients, bytes, checkpointing, and back."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_lib.agoq import (
    ActivationPlan,
    Format,
    NormLinear,
    QuantLinear,
    SwiGLULinear,
    quantize_activations,
    restore_activations,
)
from dist_lib.models import Decoder, DecoderConfig, DecoderLayer, SavedTensorCounter, get_config
from dist_lib.models.decoder import rotary_table
from dist_lib.ops import quantized_nbytes

SMALL = DecoderConfig(
    vocab_size=64, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=160, max_seq_len=64,
    rope_theta=1e4, norm_eps=1e-5, tie_embeddings=True,
)  # fmt: skip


def _batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (2, 24), generator=g) for _ in range(2)]


def _gradient(model):
    model.zero_grad()
    loss = model.loss(*_batch())
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("layout", ["shared", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forward_pass_does_not_change_a_bit_and_the_way_back_is_complete(dtype, layout):
    model = Decoder(SMALL).to(dtype)
    tokens = _batch()[0]
    before, keys = model(tokens), list(model.state_dict())
    loss, exact = _gradient(model)
    assert quantize_activations(model, ActivationPlan("fp4", 32, layout=layout)) is model
    assert torch.equal(model(tokens), before) and list(model.state_dict()) == keys
    with torch.no_grad():
        assert torch.equal(model(tokens), before)
    loss_q, gradient = _gradient(model)
    assert torch.equal(loss, loss_q)
    assert 0.001 < (gradient - exact).norm() / exact.norm() < 0.15
    restore_activations(model)
    assert all(type(layer) is DecoderLayer and "forms" not in vars(layer) for layer in model.layers)
    assert torch.equal(_gradient(model)[1], exact)


def test_with_eight_bits_the_gradient_is_almost_exact_and_bits_matter():
    model = Decoder(SMALL)
    exact = _gradient(model)[1]
    errors = []
    for codec in ("int8", "int6", "int5", "nf4", "fp4"):
        quantize_activations(model, ActivationPlan(codec, 32))
        errors.append(float((_gradient(model)[1] - exact).norm() / exact.norm()))
    assert errors == sorted(errors) and errors[0] < 0.01


def test_each_part_costs_and_together_they_cost_more():
    model = Decoder(SMALL)
    exact = _gradient(model)[1]

    def error(*parts):
        quantize_activations(model, ActivationPlan("fp4", 32, layout="paper", parts=parts))
        return float((_gradient(model)[1] - exact).norm() / exact.norm())

    alone = [error(part) for part in ("norm", "gate_up", "out")]
    assert error() < 1e-6 and min(alone) > 1e-4
    together = sum(e * e for e in alone) ** 0.5  # the errors are nearly independent
    assert error("norm", "gate_up", "out") == pytest.approx(together, rel=0.2)
    with pytest.raises(ValueError, match="'norm', 'gate_up', 'out'"):
        ActivationPlan(parts=("attention",))


def test_one_codec_for_each_layer():
    model = Decoder(SMALL)
    quantize_activations(model, ActivationPlan(("fp4", None, "int8"), 32))
    assert [layer.forms.norm.codec if "forms" in vars(layer) else None for layer in model.layers] == [
        "fp4",
        None,
        "int8",
    ]
    assert type(model.layers[1]) is DecoderLayer
    quantize_activations(model, ActivationPlan((None, "int5", None), 32))
    assert [type(layer) is DecoderLayer for layer in model.layers] == [True, False, True]
    with pytest.raises(ValueError, match="2 codecs for 3 layers"):
        quantize_activations(model, ActivationPlan(("fp4", "fp4")))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("layout", "codec"), [("shared", "fp4"), ("paper", "fp4"), ("shared", "int5")])
def test_bytes_held_for_backward_are_those_of_the_formula(layout, codec, scale_dtype):
    """From shapes alone: rows x (codes + scales) of x twice and of gate and up, and attention's own tensors."""
    d, f, heads, b, s = 128, 512, 4, 2, 64
    config = DecoderConfig(
        vocab_size=64, d_model=d, n_layers=1, n_heads=heads, n_kv_heads=heads, d_ff=f, max_seq_len=s,
        rope_theta=1e4, norm_eps=1e-5, tie_embeddings=True,
    )  # fmt: skip
    model = Decoder(config).bfloat16()
    quantize_activations(model, ActivationPlan(codec, 128, scale_dtype, layout))
    layer = model.layers[0]
    cos, sin = rotary_table(config, s, torch.device("cpu"))
    x = torch.randn(b, s, d).bfloat16().requires_grad_()
    with SavedTensorCounter(model) as counter:
        layer(x, cos, sin)
    stored = [quantized_nbytes((b, s, width), codec, 128, scale_dtype) for width in (d, d, f, f)]
    stored += [quantized_nbytes((b, s, d), codec, 128, scale_dtype)] if layout == "paper" else []
    unit = b * s * d * 2
    attention = (6 if layout == "paper" else 4) * unit + b * heads * s * 4 + 4 * s * (d // heads) * 2
    factors = 2 * b * s * 4
    assert counter.bytes == pytest.approx(sum(stored) + attention + factors, rel=0.001)
    plain = Decoder(config).bfloat16().layers[0]
    with SavedTensorCounter(plain) as before:
        plain(x, cos, sin)
    assert counter.bytes < 0.45 * before.bytes  # heads of 32 keep more statistics and constants than real ones


def test_bytes_held_by_a_layer_of_smollm2_are_those_of_the_formula():
    """Width 576 is nine blocks of 64; three key heads are repeated to nine before they are kept."""
    config = dataclasses.replace(get_config("smollm2-135m"), n_layers=1, vocab_size=64, max_seq_len=64)
    model = quantize_activations(Decoder(config).bfloat16(), ActivationPlan("nf4", 64))
    cos, sin = (t.bfloat16() for t in rotary_table(config, 64, torch.device("cpu")))
    x = torch.randn(1, 64, config.d_model).bfloat16().requires_grad_()
    with SavedTensorCounter(model) as counter:
        model.layers[0](x, cos, sin)
    stored = 2 * (quantized_nbytes((64, config.d_model), "nf4", 64) + quantized_nbytes((64, config.d_ff), "nf4", 64))
    attention = 4 * 64 * config.d_model * 2 + config.n_heads * 64 * 4 + cos.nbytes + sin.nbytes
    assert counter.bytes == pytest.approx(stored + attention + 2 * 64 * 4, rel=0.001)


def test_checkpointing_gives_the_same_gradients_and_keeps_less():
    model = Decoder(SMALL)
    quantize_activations(model, ActivationPlan("nf4", 32))
    exact = _gradient(model)[1]
    forwards = [layer.forward for layer in model.layers]
    for layer, forward in zip(model.layers, forwards, strict=True):
        layer.forward = lambda *a, f=forward: checkpoint(f, *a, use_reentrant=False)
    assert torch.equal(_gradient(model)[1], exact)


def test_modules_hold_the_parameters_of_the_plain_ones():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=g)
    form = Format("int8", 32)
    quant, plain = QuantLinear(64, 32, form), nn.Linear(64, 32, bias=False)
    quant.load_state_dict(plain.state_dict())
    assert torch.equal(quant(x), plain(x))
    norm = NormLinear(64, (32, 32), form=form)
    gate, up = norm(x)
    with torch.no_grad():
        assert torch.equal(norm(x)[0], gate)
    assert torch.equal(gate, norm.products[0](norm.norm(x)))
    down = SwiGLULinear(32, 64, form)
    assert torch.equal(down(gate, up), nn.functional.linear(nn.functional.silu(gate) * up, down.weight))
    down(gate, up).sum().backward()
    assert norm.products[1].weight.grad.abs().sum() > 0 and norm.norm.weight.grad.abs().sum() > 0


def test_a_copy_and_a_compiled_model_work():
    model = quantize_activations(Decoder(SMALL), ActivationPlan("fp4", 32))
    loss, gradient = _gradient(copy.deepcopy(model))
    compiled = torch.compile(model.layers[0], backend="aot_eager", fullgraph=True)
    cos, sin = rotary_table(SMALL, 24, torch.device("cpu"))
    x = torch.randn(2, 24, 64, requires_grad=True)
    out, same = compiled(x, cos, sin), model.layers[0](x, cos, sin)
    torch.testing.assert_close(out, same)
    a = torch.autograd.grad(out.square().sum(), x)[0]
    b = torch.autograd.grad(same.square().sum(), x)[0]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(gradient, _gradient(model)[1]) and loss.isfinite()


def test_what_cannot_be_converted_is_refused_and_left_as_it_was():
    with pytest.raises(ValueError, match="no decoder layers"):
        quantize_activations(nn.Linear(3, 3), ActivationPlan())
    model = Decoder(SMALL)
    model.layers[2].mlp.up_proj = nn.Linear(64, 160, bias=True)
    with pytest.raises(ValueError, match="with a bias"):
        quantize_activations(model, ActivationPlan())
    assert type(model.layers[0]) is DecoderLayer
    model = Decoder(SMALL)
    model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        quantize_activations(model, ActivationPlan())
    model = Decoder(SMALL)
    model.layers[0].__class__ = type("Wrapped", (DecoderLayer,), {})
    with pytest.raises(ValueError, match=r"layers\.0 is a Wrapped"):
        quantize_activations(model, ActivationPlan())
    with pytest.raises(ValueError, match="'shared', 'paper'"):
        ActivationPlan(layout="best")
