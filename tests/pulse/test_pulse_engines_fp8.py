"""Low-precision receivers: patched bytes equal a full quantisation, in both designs; and the quantisers themselves."""

import math
import uuid

import pytest
import torch

from dist_lib.pulse import Publisher, StateError, Store, Subscriber, digest_state
from dist_lib.pulse.fp8 import (
    Fp8Shadow,
    block_scales,
    changed_blocks,
    dequantise_fp8,
    quantise_fp8,
    quantise_state,
)
from dist_lib.pulse.low_precision import FORMATS, change_rates, quantise_int8_rows, quantise_mxfp4
from dist_lib.pulse.streams import adamw_stream


def states(count, *, lr=2e-4):
    """Bfloat16 states with two matrices (odd sizes), a tied pair and a norm; few cells change from one to the next."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a_proj": (300, 257), "b_proj": (128, 128), "norm": (64,), "embed": (40, 32)}
    masters = {n: 0.02 * torch.randn(s, generator=generator) for n, s in shapes.items()}
    out = []
    for step in range(count):
        state = {n: t.bfloat16() for n, t in masters.items()}
        out.append({**state, "head": state["embed"]})
        for t in masters.values():
            rows = torch.randint(0, len(t), (2,), generator=generator)
            t[rows] += lr * (1 + 200 * (step == 3)) * torch.randn(t[rows].shape, generator=generator)
    return out


def loop_quantise(weight, block, power):
    """Block by block and cell by cell in float64, through torch's own cast of single numbers."""
    rows, cols = weight.shape
    payload = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // block), -(-cols // block))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block]
            largest = float(part.abs().max())
            s = 1.0 if largest == 0 else largest / 448
            if power and largest:
                s = 2.0 ** math.ceil(math.log2(largest / 448))
            s = float(torch.tensor(s))
            scale[i, j] = s
            wide = (part.double() / s).clamp(-448, 448).float()
            payload[i * block : (i + 1) * block, j * block : (j + 1) * block] = wide.to(torch.float8_e4m3fn)
    return payload, scale


@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (128, 128), (129, 257), (300, 64)])
def test_fp8_against_a_loop(shape):
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    payload, scale = quantise_fp8(weight)
    wanted, wanted_scale = loop_quantise(weight, 128, power=True)
    assert torch.equal(payload.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scale, wanted_scale)
    assert payload.float().abs().max() <= 448 and torch.equal(scale, torch.exp2(scale.log2().round()))
    error = (dequantise_fp8(payload, scale) - weight).abs()
    assert (error <= weight.abs() / 16 + scale.max() * 2**-10).all()
    other, other_scale = quantise_fp8(weight, scales="float32")
    assert torch.equal(other_scale, loop_quantise(weight, 128, power=False)[1])
    assert other.float().abs().max() == 448


def test_scales_at_the_edges():
    sizes = torch.tensor([0.0, 448.0, 449.0, 224.0, 224.1, 2.0**-126, 1e-42, 3e38])
    found = block_scales(sizes)
    assert found.tolist() == [1.0, 1.0, 2.0, 0.5, 1.0, 2.0**-126, 2.0**-126, 2.0**120]
    assert ((sizes / found) <= 448).all()
    for wrong in (torch.tensor([float("nan")]), torch.tensor([float("inf")])):
        with pytest.raises(ValueError, match="NaN or infinite"):
            block_scales(wrong)
    with pytest.raises(ValueError, match="must be one of"):
        block_scales(sizes, scales="bfloat16")
    with pytest.raises(ValueError, match="a matrix"):
        quantise_fp8(torch.ones(3))
    zero, scale = quantise_fp8(torch.zeros(130, 4))
    assert zero.float().abs().max() == 0 and scale.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("scales", ["power of two", "float32"])
def test_trainer_quantises(scales):
    store = Store(f"memory://{uuid.uuid4()}")
    publisher, subscriber = Publisher(store, workers=1), Subscriber(store, workers=1)
    for state in states(6):
        quantised = quantise_state(state, scales=scales)
        assert quantised["a_proj"].dtype == torch.float8_e4m3fn and quantised["a_proj_scale_inv"].shape == (3, 3)
        assert quantised["head"] is quantised["embed"] and quantised["norm"].dtype == torch.bfloat16
        done = publisher.publish(quantised)
        subscriber.poll()
        assert digest_state(subscriber.state, workers=1) == digest_state(quantised, workers=1)
        for name, tensor in quantised.items():
            assert torch.equal(subscriber.state[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert done.patch_bytes < sum(t.nbytes for t in quantised.values()) / 3


@pytest.mark.parametrize("scales", ["power of two", "float32"])
def test_receiver_quantises_only_changed_blocks(scales):
    store = Store(f"memory://{uuid.uuid4()}")
    publisher, subscriber = Publisher(store, workers=1), Subscriber(store, workers=1)
    shadow, counts = None, []
    for state in states(6):
        publisher.publish(state)
        subscriber.poll()
        if shadow is None:
            shadow = Fp8Shadow(subscriber.state, scales=scales)
            pointers = {n: t.data_ptr() for n, t in shadow.quantised.items() if "proj" in n}
        else:
            counts.append(shadow.update(subscriber.state))
        wanted = quantise_state(state, scales=scales)
        assert digest_state(shadow.quantised, workers=1) == digest_state(wanted, workers=1)
    assert {n: t.data_ptr() for n, t in shadow.quantised.items() if "proj" in n} == pointers
    assert all(0 < c["a_proj"] < 9 for c in counts)  # two rows change: at most 6 of 9 blocks
    assert shadow.update(subscriber.state) == {}


def test_changed_blocks_are_found_by_bits():
    old = torch.zeros(200, 300).bfloat16()
    new = old.clone()
    new[130, 299] = -0.0
    assert [tuple(w) for w in zip(*changed_blocks(old, new).nonzero(), strict=True)] == [(1, 2)]


def test_a_state_that_cannot_be_quantised_changes_nothing():
    first = states(1)[0]
    shadow = Fp8Shadow(first)
    before = digest_state(shadow.quantised, workers=1)
    bad = {**first, "b_proj": first["b_proj"].clone(), "a_proj": first["a_proj"] * 2}
    bad["b_proj"][5, 5] = float("nan")
    with pytest.raises(StateError, match="'b_proj'"):
        shadow.update(bad)
    with pytest.raises(StateError, match="names differ"):
        shadow.update({n: t for n, t in first.items() if n != "norm"})
    with pytest.raises(StateError, match="'norm' was"):
        shadow.update({**first, "norm": torch.ones(3).bfloat16()})
    assert digest_state(shadow.quantised, workers=1) == before
    with pytest.raises(StateError, match="is there already"):
        quantise_state({**first, "a_proj_scale_inv": torch.ones(1)})


def test_int8_and_mxfp4_against_loops():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(5, 64, generator=generator) * torch.exp2(torch.randint(-9, 9, (5, 1), generator=generator))
    weight[4] = 0
    payload, scale = quantise_int8_rows(weight)
    for row in range(5):
        s = float(weight[row].abs().max()) / 127 or 1.0
        assert float(scale[row]) == pytest.approx(s, rel=1e-6)
        wanted = (weight[row] / scale[row]).double()
        assert (payload[row].double() - wanted).abs().max() <= 0.5
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes, exponents = quantise_mxfp4(weight)
    for row in range(5):
        for block in range(2):
            part = weight[row, 32 * block : 32 * block + 32]
            largest = float(part.abs().max())
            exponent = math.floor(math.log2(largest)) - 2 if largest else 0
            assert int(exponents[row, block]) == exponent
            for cell, value in enumerate(part.tolist()):
                code = int(codes[row, 32 * block + cell])
                size = abs(value) / 2.0**exponent
                best = min(range(8), key=lambda k: (abs(grid[k] - min(size, 6.0)), k % 2))
                assert code & 7 == best and code >> 3 == (math.copysign(1, value) < 0)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 4])
    assert (quantise_mxfp4(ties)[0][0, :8] & 7).tolist() == [0, 2, 2, 4, 4, 6, 6, 6]
    with pytest.raises(ValueError, match="blocks of 32"):
        quantise_mxfp4(torch.ones(2, 33))


def test_coarser_formats_change_less_and_scales_follow_their_source():
    *_, last = adamw_stream(512 * 512, lr=3e-6, steps=30, storage="fp32")
    old, new = last.weight.view(512, 512), (last.weight + last.update).view(512, 512)
    rates = change_rates(old, new)
    assert list(rates) == list(FORMATS)
    elements = [r.elements for r in rates.values()]
    assert 0.02 < elements[0] < 0.03 and rates["BF16"].scales is None
    assert elements[0] > 5 * elements[1] and elements[2] > elements[3] > 3 * elements[4] > 0
    assert min(rates[f"{n}, float32 scale"].scales for n in ("FP8, 128 x 128", "INT8, rows")) > 0.9
    assert rates["FP8, 128 x 128, power-of-two scale"].scales == 0.0
    through = change_rates(old, new, through_bf16=True)
    assert through["FP8, 128 x 128, float32 scale"].scales <= 0.125 and through["BF16"] == rates["BF16"]
