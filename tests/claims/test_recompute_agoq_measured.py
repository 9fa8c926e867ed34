"""Values of the AGoQ chapter in the ledger that are measured: codecs, sums, layers, gradients of a trained model."""

import json
import math
from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch

from dist_lib.agoq import (
    ActivationPlan,
    Format,
    GradientFormat,
    adamw_8bit,
    moment_bytes,
    norm_linear,
    quantize_activations,
    state_bytes,
)
from dist_lib.agoq.collectives import all_reduce, simulate_all_reduce, simulate_ring
from dist_lib.agoq.layer_memory import LayerShape, layer_units, statistics_bytes
from dist_lib.agoq.quality import exact_gradient, gradient_quality, local_errors, storing
from dist_lib.agoq.wire import wire_bytes
from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.comm import CommCounter, collectives, distributed, launch
from dist_lib.models import Decoder, DecoderConfig, SavedTensorCounter
from dist_lib.models.decoder import rotary_table
from dist_lib.ops import CODECS, accumulate_, error_table, quantize, quantized_zeros
from dist_lib.ops.quantization_error import DISTRIBUTIONS, samples
from dist_lib.tasks import BatchSampler, load_corpus
from labs.agoq.activations import RECORD

SHAPE = {"n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "d_ff": 176, "max_seq_len": 64, "tie_embeddings": False}
SMALL = DecoderConfig(vocab_size=256, d_model=64, **SHAPE)
FP4, NF4 = Format("fp4", 128), Format("nf4", 128)
pytestmark = pytest.mark.timeout(300)  # training, on a machine that is busy


def _register(prefix, names, function):
    for name in names:
        recomputes(f"{prefix}{name}")(lambda name=name: function(name))


def _relative(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# ---- formats --------------------------------------------------------------------------------------------------------


def codec_error(name):
    found = error_table(codecs=(name,), block_sizes=(128,), distributions=("gaussian",), count=2**18)
    return 100 * next(iter(found)).relative_l2


_register("agoq-codec-", [n for n in CODECS if n != "int4_minmax"], codec_error)


@recomputes("agoq-codec-bound")
def codec_bound():
    largest = 0.0
    for distribution in DISTRIBUTIONS:
        x = samples(distribution, 2**15)
        for name, codec in CODECS.items():
            for block in (32, 128, 256):
                moved = (quantize(x, name, block, flat=True).dequantize() - x).abs().view(-1, block).amax(1)
                values = x.view(-1, block)
                span = values.amax(1) - values.amin(1) if codec.kind == "minmax" else values.abs().amax(1)
                largest = max(largest, float((moved / (codec.half_gap * span)).max()))
    return largest


@lru_cache(maxsize=2)
def _local(codec):
    errors, generator = {}, torch.Generator().manual_seed(0)
    held, exact = quantized_zeros((2**16,), codec, 256), torch.zeros(2**16, dtype=torch.float64)
    for i in range(1, 65):
        gradient = torch.randn(2**16, generator=generator)
        accumulate_(held, gradient)
        exact += gradient
        errors[i] = 100 * _relative(held.dequantize(), exact)
    return errors


for _codec in ("dynamic8", "int8"):
    _register(f"agoq-local-{_codec}-", (1, 8, 64), lambda m, codec=_codec: _local(codec)[m])


@recomputes("agoq-local-exponent")
def local_exponent():
    errors = _local("dynamic8")
    return math.log(errors[64] / errors[8]) / math.log(8)


# ---- over ranks -----------------------------------------------------------------------------------------------------


def _growth(simulate):
    def error(size):
        inputs = [torch.randn(2**14, generator=torch.Generator().manual_seed(r)) for r in range(size)]
        return _relative(simulate(inputs, form=GradientFormat("int8", 256)), torch.stack(inputs).double().sum(0))

    return error(64) / error(2)


@recomputes("agoq-sum-error-growth")
def sum_error_growth():
    return _growth(simulate_all_reduce)


@recomputes("agoq-hop-error-growth")
def hop_error_growth():
    return _growth(simulate_ring)


def _on_a_rank():
    ratios, different = [], 0
    with distributed(device="cpu") as ctx:
        for numel in (2**16, 1000):
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(ctx.rank))
            with CommCounter() as counter:
                all_reduce(tensor)
            predicted = wire_bytes("all_reduce", numel, ctx.world_size)
            ratios.append(counter.bytes() / (predicted.all_to_all + predicted.all_gather))
            first, *others = collectives.all_gather(tensor)
            different += sum(not torch.equal(first, other) for other in others)
    return ratios, different


@lru_cache(maxsize=1)
def _two_ranks():
    return launch(_on_a_rank, world_size=2)


@recomputes("agoq-wire-bytes")
def wire_bytes_counted():
    return max((r for ratios, _ in _two_ranks() for r in ratios), key=lambda r: abs(r - 1))


@recomputes("agoq-ranks-differ")
def ranks_differ():
    return float(max(different for _, different in _two_ranks()))


# ---- layers ---------------------------------------------------------------------------------------------------------


def _held_over_formula(layout, codec):
    config = DecoderConfig(vocab_size=64, d_model=256, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=640, max_seq_len=256)
    model = quantize_activations(Decoder(config).bfloat16(), ActivationPlan(codec, 128, layout=layout))
    batch, seq = 2, 128
    cos, sin = rotary_table(config, seq, torch.device("cpu"))
    x = torch.randn(batch, seq, config.d_model).bfloat16().requires_grad_()
    with SavedTensorCounter(model) as counter:
        model.layers[0](x, cos, sin)
    units = layer_units(layout, LayerShape.of(config), bits=CODECS[codec].bits, scale_bits=0.25)
    constants = cos.nbytes + sin.nbytes  # which all layers share
    formula = float(units) * 2 * batch * seq * config.d_model + statistics_bytes(config, batch * seq) + constants
    return counter.bytes / formula


@recomputes("agoq-held-bytes")
def held_bytes():
    cases = [(layout, codec) for layout in ("paper", "shared") for codec in ("fp4", "int5")]
    return max((_held_over_formula(*case) for case in cases), key=lambda ratio: abs(ratio - 1))


@recomputes("agoq-forward-bits")
def forward_bits():
    tokens = BatchSampler(load_corpus().train, batch_size=4, seq_len=64, seed=0).batch(0)[0]
    model = Decoder(SMALL)
    plain = model(tokens)
    quantize_activations(model, ActivationPlan("fp4", 128))
    return float((model(tokens) != plain).sum())


def _norm_error(dim, exact_factor):
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(512, dim, generator=generator, requires_grad=True)
    grad, gain, identity = torch.randn(512, dim, generator=generator), torch.ones(dim), torch.eye(dim)
    forms = Format("fp4", 128, exact_factor=exact_factor), Format(None)
    found, exact = (torch.autograd.grad(norm_linear(x, gain, 1e-6, (identity,), f)[0], x, grad)[0] for f in forms)
    return _relative(found, exact)


@recomputes("agoq-norm-law")
def norm_law():
    return sum(_norm_error(d, False) * math.sqrt(d) for d in (256, 1024)) / 2


@recomputes("agoq-norm-exact")
def norm_exact():
    return _norm_error(1024, False) / _norm_error(1024, True)


# ---- a trained model ------------------------------------------------------------------------------------------------


def _train(steps, scheme=None):
    """The model after ``steps`` steps, and its mean loss on 256 other rows of the text."""
    model, text = Decoder(SMALL), load_corpus().train
    sampler = BatchSampler(text, batch_size=8, seq_len=64, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    with storing(model, scheme, FP4) if scheme else nullcontext():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            loss = model.loss(*sampler.batch(step))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    with torch.no_grad():
        after = float(model.loss(*BatchSampler(text, batch_size=256, seq_len=64, seed=1).batch(0)))
    return model, after


@lru_cache(maxsize=1)
def _trained():
    batch = BatchSampler(load_corpus().train, batch_size=16, seq_len=64, seed=99).batch(0)
    model = _train(300)[0]
    return model, batch, exact_gradient(model, *batch)


def _gradient(scheme, form=FP4):
    model, batch, exact = _trained()
    return 100 * gradient_quality(model, *batch, scheme, form, exact=exact).relative_l2


recomputes("agoq-gradient-layers")(lambda: _gradient("layers"))
recomputes("agoq-gradient-layers-nf4")(lambda: _gradient("layers", NF4))
recomputes("agoq-gradient-attention")(lambda: _gradient("attention"))
recomputes("agoq-gradient-every")(lambda: _gradient("every saved tensor"))


@recomputes("agoq-attention-excluded")
def attention_excluded():
    return _gradient("attention") / _gradient("layers")


@lru_cache(maxsize=1)
def _by_kind():
    model, batch, _ = _trained()
    return local_errors(model, *batch, FP4)


_register("agoq-table-13-", ("norm", "weights", "swiglu", "query", "key", "value"), lambda kind: _by_kind()[kind])


def test_the_gate():
    """The promise, whatever the ledger's numbers: at most 15 % at a trained checkpoint, less than attention alone."""
    assert _gradient("layers", NF4) < _gradient("layers") <= 15 < _gradient("attention")
    order = _by_kind()
    assert order["norm"] < min(order["weights"], order["swiglu"], order["value"])
    assert max(order["weights"], order["swiglu"], order["value"]) < min(order["query"], order["key"])


# ---- recorded over a shaped link ------------------------------------------------------------------------------------


def _ratio(row):
    """Median ratio of the bench's row; of several recorded machines the first by name."""
    files = [json.loads(f.read_text(encoding="utf-8"))["rows"] for f in sorted(RECORD.parent.glob("bench-*.json"))]
    return next(rows[f"agoq/{row}"]["ratio"] for rows in files if f"agoq/{row}" in rows)


recomputes("agoq-all-reduce-measured")(lambda: 1 / _ratio("all-reduce"))
recomputes("agoq-all-reduce-time")(lambda: _ratio("all-reduce"))
recomputes("agoq-all-reduce-dynamic8")(lambda: _ratio("all-reduce-dynamic8"))
recomputes("agoq-all-reduce-bfloat16")(lambda: _ratio("all-reduce-against-bfloat16"))


# ---- recorded on SmolLM2 --------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _recorded():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def smollm2_gradient(name):
    scheme, codec = SMOLLM2[name]
    return 100 * _recorded()["gradient"][codec][scheme][0]


SMOLLM2 = {
    "layers": ("layers", "fp4"),
    "layers-nf4": ("layers", "nf4"),
    "layers-int8": ("layers", "int8"),
    "gate-up": ("gate and up", "fp4"),
    "every": ("every saved tensor", "fp4"),
    "norm-inputs": ("norm inputs", "fp4"),
    "out": ("out-projection input", "fp4"),
    "attention-int8": ("attention", "int8"),
}
_register("agoq-smollm2-", SMOLLM2, smollm2_gradient)
_register(
    "agoq-smollm2-13-",
    ("norm", "weights", "swiglu", "query", "key", "value"),
    lambda k: _recorded()["by_kind"]["fp4"][k],
)


@recomputes("agoq-smollm2-attention")
def smollm2_attention():
    kinds = _recorded()["by_kind"]["fp4"]
    return kinds["query"] / kinds["swiglu"]


@recomputes("agoq-smollm2-attention-fp4")
def smollm2_attention_fp4():
    found = _recorded()["gradient"]["fp4"]["attention"][0]
    return "more than 100 million" if found > 1e8 else f"{found:g}"


@recomputes("agoq-smollm2-attention-nf4")
def smollm2_attention_nf4():
    return _recorded()["gradient"]["nf4"]["attention"][0]


@recomputes("agoq-smollm2-outlier")
def smollm2_outlier():
    return max(layer[kind]["outlier"] for layer in _recorded()["layers"] for kind in ("norm 1 input", "norm 2 input"))


@recomputes("agoq-smollm2-gate")
def smollm2_gate():
    within = [codec for codec in ("fp4", "nf4") if _recorded()["gradient"][codec]["layers"][0] <= 0.15]
    return ", ".join(within) or "neither"


def test_the_record_is_consistent():
    """What must hold between numbers of one measurement, whatever they are."""
    record = _recorded()
    for name, found in record["gradient"].items():
        parts = [found[scheme][0] for scheme in ("norm inputs", "out-projection input", "gate and up")]
        together = found["layers"][0]
        assert max(parts) < together <= sum(parts), name  # errors add, and never more than in full
        for error, cosine in found.values():
            assert abs(cosine) <= 1
            if error < 1:  # the angle is at most that of a right triangle with this error as its side
                assert cosine >= math.sqrt(1 - error**2) - 1e-4, (name, error, cosine)
        assert found["attention"][0] > together, name  # why attention is left alone
    for better, worse in (("int8", "nf4"), ("nf4", "fp4")):
        for measure in ("gradient", "by_kind"):
            low, high = record[measure][better], record[measure][worse]
            first = (lambda v: v[0]) if measure == "gradient" else float
            assert all(first(low[key]) < first(high[key]) for key in low if "attention" not in key)
    order = sorted(record["by_kind"]["fp4"], key=record["by_kind"]["fp4"].get)
    assert order == ["norm", "weights", "swiglu", "value", "query", "key"]  # as in table 13
    for layer in record["layers"]:
        for kind in record["kinds"]:
            assert abs(sum(layer[kind]["values"]) - 10_000) <= 33, kind  # shares of 10 000, each rounded
            assert layer[kind]["absmax"] >= layer[kind]["rms"] and layer[kind]["outlier"] >= 1


# ---- optimizer state ------------------------------------------------------------------------------------------------


@recomputes("agoq-moment-bytes")
def moment_bytes_counted():
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((100, 50), (4095,), (64, 64), (64, 65))]
    optimizer = adamw_8bit(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return state_bytes(optimizer) / moment_bytes(p.numel() for p in parameters)


@recomputes("agoq-moment-ratio")
def moment_ratio():
    return moment_bytes([2**22], bits=32) / moment_bytes([2**22])


@lru_cache(maxsize=3)
def _loss(scheme=None):
    return _train(100, scheme)[1]


def _within(limit, scheme):
    apart = abs(_loss(scheme) - _loss())
    return f"within {limit}" if apart < limit else f"{apart:.3f}"


@recomputes("agoq-loss")
def loss():
    return _within(0.05, "layers")


@recomputes("agoq-uniform-small")
def uniform():
    return _within(0.1, "every saved tensor")


MINE = sorted(name for name, function in recomputers().items() if function.__module__ == __name__)


@pytest.mark.parametrize("claim_id", MINE)
def test_the_ledger_holds_what_is_computed(claim_id):
    claim, value = load_claims()[claim_id], recomputers()[claim_id]()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"
