"""Recorded activations of SmolLM2: the record is whole, and the code that makes it is checked on a small model."""

import json
import math

import pytest
import torch

from dist_lib.agoq.quality import SCHEMES
from dist_lib.models import Attention, Decoder, DecoderConfig
from dist_lib.ops import quantize
from labs.agoq.activations import (
    BLOCK_EDGES,
    CODECS,
    GRADIENT_CODECS,
    KINDS,
    PER,
    RECORD,
    VALUE_EDGES,
    as_text,
    captured,
    record,
    summary,
)

CONFIG = DecoderConfig(
    vocab_size=64, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=192, max_seq_len=16, tie_embeddings=True
)


@pytest.fixture(scope="module")
def batch():
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_captured_tensors_are_those_of_the_layer(batch):
    model = Decoder(CONFIG)
    with captured(model) as found, torch.no_grad():
        model(batch[0])
    seen, layer = found[1], model.layers[1]
    assert set(seen) == set(KINDS)
    assert torch.equal(seen["norm 1 output"], layer.input_layernorm(seen["norm 1 input"]))
    assert torch.equal(seen["norm 2 output"], layer.post_attention_layernorm(seen["norm 2 input"]))
    assert torch.equal(seen["gate"], layer.mlp.gate_proj(seen["norm 2 output"]))
    assert torch.equal(seen["product"], torch.nn.functional.silu(seen["gate"]) * seen["up"])
    value = layer.self_attn.v_proj(seen["norm 1 output"])
    assert torch.equal(seen["values"], value)  # each of two heads once, though four read them
    assert seen["queries"].shape == (2, 16, 128) and seen["keys"].shape == (2, 16, 64)
    assert torch.allclose(seen["queries"][:, 0], layer.self_attn.q_proj(seen["norm 1 output"])[:, 0])  # not turned yet
    assert not torch.allclose(seen["queries"][:, 9], layer.self_attn.q_proj(seen["norm 1 output"])[:, 9])
    assert all(type(m.self_attn) is Attention and "seen" not in vars(m.self_attn) for m in model.layers)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_summary_counts_what_is_there():
    x = torch.zeros(4, 128)
    x[:, 0], x[:, 1], x[:, 64] = 1.0, -0.5, 4.0
    found = summary(x, 64)
    assert found["absmax"] == 4 and found["rms"] == pytest.approx(math.sqrt((1 + 0.25 + 16) / 128), rel=1e-3)
    shares = dict(zip(VALUE_EDGES, found["values"], strict=False))
    assert len(found["values"]) == 33 and sum(found["values"]) == pytest.approx(PER, abs=17)
    assert found["values"][-1] == round(PER * 2 / 128) and found["values"][16] == round(PER * 125 / 128)
    assert shares[VALUE_EDGES[8]] == round(PER / 128)
    assert len(found["blocks"]) == len(BLOCK_EDGES) - 1 and sum(found["blocks"]) == PER
    filled = [BLOCK_EDGES[i] for i, n in enumerate(found["blocks"]) if n]
    assert filled == [math.floor(2 * math.log2(v / found["rms"])) / 2 for v in (1.0, 4.0)]
    assert found["errors"]["int8"] < 0.01
    y = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    y[:, 5] *= 30
    found = summary(y, 32)
    assert found["outlier"] > 15
    error = float((quantize(y, "fp4", 32).dequantize() - y).norm() / y.norm())
    assert found["errors"]["fp4"] == pytest.approx(error, rel=1e-3)
    with pytest.raises(ValueError, match="do not divide a width of 128"):
        summary(y, 256)


def test_a_small_model_is_recorded_as_the_large_one_was(batch):
    model = Decoder(CONFIG)
    found = record(model, *batch, block_size=32, schemes=("layers", "attention"))
    assert found["loss"] == pytest.approx(float(model.loss(*batch).detach()), abs=1e-4)
    assert json.loads(as_text(found)) == found
    assert set(found["gradient"]) == set(GRADIENT_CODECS) == set(found["by_kind"])
    for codec in GRADIENT_CODECS:
        assert set(found["gradient"][codec]) == {"layers", "attention"}
        assert set(found["by_kind"][codec]) == {"norm", "weights", "swiglu", "query", "key", "value"}
    assert found["gradient"]["int8"]["layers"][0] < 0.1 * found["gradient"]["fp4"]["layers"][0]


@pytest.fixture(scope="module")
def recorded():
    assert RECORD.stat().st_size < 200_000
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_record_is_whole(recorded):
    assert recorded["kinds"] == KINDS and len(recorded["layers"]) == 30
    assert 1 < recorded["loss"] < 4  # nats a token
    assert recorded["block_size"] == 64 and recorded["block_edges"] == list(BLOCK_EDGES)
    assert recorded["value_edges"] == pytest.approx(VALUE_EDGES, abs=1e-5)
    for layer in recorded["layers"]:
        assert list(layer) == list(KINDS)
        for one in layer.values():
            assert len(one["values"]) == len(VALUE_EDGES) - 1 and abs(sum(one["values"]) - PER) < 20
            assert len(one["blocks"]) == len(BLOCK_EDGES) - 1 and abs(sum(one["blocks"]) - PER) < 20
            assert 0 < one["rms"] < one["absmax"] and one["outlier"] >= 1
            error = one["errors"]
            assert set(error) == set(CODECS)
            assert error["int8"] < error["int6"] < error["int5"] < error["int4"]
            assert one["values"][0] + one["values"][-1] >= PER // 64 - 10  # every block has its largest


def test_the_record_says_what_the_chapter_says(recorded):
    """A trained model of 135 million parameters: attention alone costs more than everything that AGoQ stores."""
    gradient, by_kind = recorded["gradient"], recorded["by_kind"]
    assert set(gradient) == set(by_kind) == set(GRADIENT_CODECS)
    for codec in GRADIENT_CODECS:
        assert set(gradient[codec]) == set(SCHEMES)
        assert gradient[codec]["attention"][0] > gradient[codec]["layers"][0]
        assert gradient[codec]["every saved tensor"][0] > gradient[codec]["layers"][0]
        assert all(-1 <= cosine <= 1 for _, cosine in gradient[codec].values())
    assert gradient["int8"]["layers"][0] < gradient["nf4"]["layers"][0] < gradient["fp4"]["layers"][0]
    for kind in by_kind.values():
        assert kind["norm"] < min(kind["weights"], kind["swiglu"])
        assert max(kind["weights"], kind["swiglu"]) < kind["value"] < min(kind["query"], kind["key"])


def test_attention_from_codes_uses_weights_that_do_not_add_up_to_one(recorded):
    """The fused backward pass keeps the exact scores' sum of exponentials; scores from 4-bit codes may exceed it."""
    assert recorded["gradient"]["fp4"]["attention"][0] > 100 * recorded["by_kind"]["fp4"]["query"]
    assert recorded["gradient"]["int8"]["attention"][0] < 0.1
