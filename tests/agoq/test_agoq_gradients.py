"""Gradients in 8 bits, in one process: accumulation, simulated ranks, formulas of bytes, buckets, refusals."""

import math

import pytest
import torch
from torch import nn

from dist_lib.agoq.buckets import Bucket
from dist_lib.agoq.collectives import simulate_all_reduce, simulate_ring
from dist_lib.agoq.gradients import QuantizedGradients, clip_factor
from dist_lib.agoq.reducer import QuantizedReducer
from dist_lib.agoq.wire import GradientFormat, Shards, sum_messages, wire_bytes

FORMS = [GradientFormat("int8", 256), GradientFormat("dynamic8", 256), GradientFormat("e4m3", 128)]
IDS = [f.codec for f in FORMS]


def error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def gradients(model, form=None, **more):
    return QuantizedGradients(model.named_parameters(), QuantizedReducer(form, min_elements=100), **more)


# ---- simulated ranks ------------------------------------------------------------------------------------------------


def ranks(size, numel=2**14):
    generator = torch.Generator().manual_seed(size)
    shared = torch.randn(numel, generator=generator)
    return [shared + torch.randn(numel, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_error_is_flat_in_the_number_of_ranks_and_grows_with_a_rounding_at_every_hop(form):
    ours, ring = [], []
    for size in (2, 8, 64):
        inputs = ranks(size)
        exact = torch.stack(inputs).double().sum(0)
        ours.append(error(simulate_all_reduce(inputs, form=form), exact))
        ring.append(error(simulate_ring(inputs, form=form), exact))
    assert max(ours) < 1.1 * ours[0]
    assert ring[0] < ours[0]  # of two, the last adds its own unrounded
    assert ring[2] > 2.5 * ours[2]
    assert ring[2] / ring[1] > 1.8  # about the root of 8


@pytest.mark.parametrize(("codec", "once"), [("dynamic8", 0.0108), ("int8", 0.0070)])
def test_independent_gradients_are_rounded_twice(codec, once):
    inputs = [torch.randn(2**14, generator=torch.Generator().manual_seed(r)) for r in range(64)]
    found = simulate_all_reduce(inputs, form=GradientFormat(codec))
    assert error(found, torch.stack(inputs).double().sum(0)) == pytest.approx(once * math.sqrt(2), rel=0.05)


def test_a_mean_is_divided_in_float32_before_the_last_rounding():
    inputs = ranks(3, 1000)
    mean = simulate_all_reduce(inputs, op="mean")
    assert error(mean * 3, simulate_all_reduce(inputs)) < 0.005
    big = [torch.full((512,), 3e38), torch.full((512,), 3e38)]
    assert simulate_all_reduce(big).isnan().all()  # the sum overflows, and says so
    assert simulate_all_reduce([b / 2 for b in big], op="mean").isfinite().all()


def test_codes_are_never_added_as_codes():
    inputs = [torch.full((512,), 1.0)] * 4  # four times code 127: as int8 the sum would be -4
    assert torch.equal(simulate_all_reduce(inputs), torch.full((512,), 4.0))


def test_stochastic_rounding_is_right_on_average():
    form = GradientFormat(rounding="stochastic")
    inputs = ranks(2, 512)
    generator = torch.Generator().manual_seed(0)
    exact = torch.stack(inputs).double().sum(0)
    runs = torch.stack([simulate_all_reduce(inputs, form=form, generator=generator) for _ in range(100)])
    nearest = error(simulate_all_reduce(inputs), exact)
    assert error(runs[0], exact) > 1.1 * nearest
    assert error(runs.double().mean(0), exact) < 0.35 * nearest


# ---- messages and their bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 257, 1000])
def test_messages_hold_scales_and_codes_and_come_back(form, length):
    shards = Shards.encode(torch.randn(3, length), form)
    rows = shards.pack()
    assert rows.shape == (3, form.message_bytes(length))
    back = Shards.unpack(rows, length, form)
    assert torch.equal(back.codes, shards.codes) and torch.equal(back.scales, shards.scales)
    expected = shards.decode()
    assert torch.equal(sum_messages(rows, length, form), expected[0] + expected[1] + expected[2])


def test_bytes_of_a_million_numbers():
    """The volume that AGoQ's scheme moves: 2 (W - 1) / W N (1 + 4 / block)."""
    assert wire_bytes("all_reduce", 2**20, 2).sent == 1_064_960
    assert wire_bytes("all_reduce", 2**20, 4).sent == 1_597_440
    exact = 2 * 3 * 2**20 * 4 // 4  # a ring of four in float32
    assert exact / wire_bytes("all_reduce", 2**20, 4).sent == pytest.approx(3.938, abs=0.001)
    assert wire_bytes("reduce_scatter", 2**20, 4).sent * 2 == 1_597_440
    assert wire_bytes("all_reduce", 2**20, 1) == wire_bytes("reduce", 0, 4)


def test_two_hops_divide_what_leaves_a_node_by_the_ranks_on_it():
    flat = wire_bytes("all_reduce", 2**20, 64, ranks_per_node=8)
    nodes = wire_bytes("all_reduce", 2**20, 64, ranks_per_node=8, hops=2)
    assert flat.between_nodes == 8 * nodes.between_nodes
    assert nodes.sent == flat.sent
    with pytest.raises(ValueError, match="whole nodes"):
        wire_bytes("all_reduce", 10, 6, ranks_per_node=4)
    with pytest.raises(ValueError, match="choose 'all_reduce'"):
        wire_bytes("broadcast", 10, 6)


def test_formats_that_are_refused():
    with pytest.raises(ValueError, match="8 bits"):
        GradientFormat("fp4")
    with pytest.raises(ValueError, match="block_size"):
        GradientFormat(block_size=100)
    with pytest.raises(ValueError, match="rounding"):
        GradientFormat(rounding="up")
    with pytest.raises(ValueError, match="min_elements"):
        QuantizedReducer(min_elements=-1)


# ---- buckets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_no_block_spans_two_gradients_and_room_between_them_is_zero(form):
    shapes = {"norm": torch.Size([5]), "matrix": torch.Size([30, 20]), "empty": torch.Size([0]), "bias": torch.Size([])}
    bucket = Bucket(shapes, form, 3, torch.device("cpu"))
    values = {"norm": torch.full((5,), 1e4), "matrix": torch.randn(30, 20), "empty": torch.zeros(0)}
    for name, value in values.items():
        bucket.put(name, value)
    assert error(bucket.view("matrix").dequantize(), values["matrix"]) < 0.04
    assert bucket.view("empty").dequantize().shape == (0,)
    flat = bucket.shards.decode().view(-1)
    filled = torch.zeros_like(flat, dtype=torch.bool)
    for name in shapes:
        filled[bucket.span(name)] = True
    assert (flat[~filled] == 0).all()
    assert flat.numel() == 3 * bucket.length and bucket.length % form.block_size == 0


def test_shards_of_a_bucket_cover_every_gradient_once():
    bucket = Bucket({"a": torch.Size([300]), "b": torch.Size([700]), "c": torch.Size([1])}, FORMS[0], 3, "cpu")
    flat = bucket.shards.codes.view(3, -1)
    for name, numel in (("a", 300), ("b", 700), ("c", 1)):
        seen = torch.zeros(numel)
        for part in range(3):
            numbers, place = bucket.inside(name, part)
            assert flat[part, place].numel() == numbers.stop - numbers.start
            seen[numbers] += 1
        assert (seen == 1).all()


# ---- accumulation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "expected"),
    [(FORMS[1], {1: 0.0108, 8: 0.0231, 64: 0.0630}), (FORMS[0], {1: 0.0070, 8: 0.0148, 64: 0.0396})],
    ids=["dynamic8", "int8"],
)
def test_error_grows_as_the_root_of_the_number_of_micro_batches(form, expected):
    held = QuantizedGradients([("w", nn.Parameter(torch.zeros(128, 128)))], QuantizedReducer(form, min_elements=0))
    generator = torch.Generator().manual_seed(0)
    exact, found = torch.zeros(128, 128).double(), {}
    for count in range(1, 65):
        gradient = torch.randn(128, 128, generator=generator)
        held.add_("w", gradient)
        exact += gradient
        found[count] = error(held.gradient("w"), exact)
    for count, value in expected.items():
        assert found[count] == pytest.approx(value, rel=0.1)
    assert 0.42 < math.log(found[64] / found[8]) / math.log(8) < 0.55


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.RMSNorm(40), nn.Linear(40, 24, bias=False))


def loss(net, seed):
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
    return net(x).square().mean()


def test_backward_adds_here_and_leaves_no_gradient_behind():
    net, twin = model(), model()
    held = gradients(net)
    held.attach()
    for seed in range(4):
        loss(net, seed).backward()
        loss(twin, seed).backward()
    assert all(p.grad is None for p in net.parameters())
    wanted = dict(twin.named_parameters())
    for name, parameter, gradient in held.items():
        assert gradient.shape == parameter.shape and gradient.dtype == torch.float32
        if parameter.numel() < 100:
            assert torch.allclose(gradient, wanted[name].grad, rtol=1e-6)
        else:
            assert 0 < error(gradient, wanted[name].grad) < 0.02
    held.assign()
    assert all(p.grad is not None for p in net.parameters())
    held.detach()
    held.reset()
    net.zero_grad()
    loss(net, 0).backward()
    assert all(p.grad is not None for p in net.parameters()) and held.norm() == 0


def test_bytes_held():
    held = QuantizedGradients([("w", nn.Parameter(torch.zeros(100, 256)))], QuantizedReducer(min_elements=0))
    assert held.nbytes == 100 * 256 + 100 * 4
    exact = QuantizedGradients([("w", nn.Parameter(torch.zeros(100, 256)))], QuantizedReducer())
    assert exact.nbytes == 100 * 256 * 4


def test_buckets_hold_no_more_than_was_asked_for():
    parameters = [(str(i), nn.Parameter(torch.zeros(300))) for i in range(7)]
    held = QuantizedGradients(parameters, QuantizedReducer(min_elements=0), bucket_elements=700)
    assert [b.names for b in held._buckets] == [["0", "1"], ["2", "3"], ["4", "5"], ["6"]]


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_clipping_multiplies_scales_and_a_bad_number_shows(form):
    net = model()
    held = gradients(net, form)
    held.attach()
    loss(net, 0).backward()
    wanted = torch.cat([g.flatten() for _, _, g in held.items()])
    norm = held.clip_(1e-3)
    assert norm == pytest.approx(float(wanted.double().norm()), rel=1e-6)
    clipped = torch.cat([g.flatten() for _, _, g in held.items()])
    assert error(clipped, wanted * (1e-3 / norm)) < 1e-6
    assert held.clip_(1.0) == pytest.approx(1e-3, rel=1e-6)
    assert torch.equal(clipped, torch.cat([g.flatten() for _, _, g in held.items()]))
    assert held.is_finite()
    held.add_("0.weight", torch.full((40, 24), float("nan")))
    assert not held.is_finite() and math.isnan(held.norm())
    held.clip_(1.0)
    assert held.gradient("2.weight").isnan().all()
    held.reset()
    assert held.is_finite() and held.norm() == 0
    held.add_("2.weight", torch.ones(24, 40))
    assert error(held.gradient("2.weight"), torch.ones(24, 40)) < 1e-6


def test_what_clipping_multiplies_by():
    assert clip_factor(2.0, 1.0) == 0.5
    assert clip_factor(0.0, 1.0) == 1.0 == clip_factor(1.0, 1.0)
    assert math.isnan(clip_factor(math.inf, 1.0)) and math.isnan(clip_factor(math.nan, 1.0))
    with pytest.raises(ValueError, match="above 0"):
        clip_factor(1.0, 0.0)


def test_one_process_alone_reduces_to_itself():
    net = model()
    held = gradients(net)
    held.attach()
    loss(net, 0).backward()
    before = {name: g for name, _, g in held.items()}
    held.all_reduce()
    assert all(torch.equal(g, before[name]) for name, _, g in held.items())
    with pytest.raises(RuntimeError, match="reset"):
        held.all_reduce()
    with pytest.raises(RuntimeError, match="after the reduction"):
        loss(net, 0).backward()
    held.reset()
    net.zero_grad()
    loss(net, 0).backward()
    shards = held.reduce_scatter()
    for name, (numbers, values) in shards.parts.items():
        assert torch.equal(values, before[name].flatten()[numbers])
    assert {*shards.parts, *shards.whole} == set(before)
    with pytest.raises(RuntimeError, match="in the shards"):
        held.norm()
    assert shards.clip_(1e-4) > 1e-4 and shards.norm() == pytest.approx(1e-4)


def test_refusals():
    net = model()
    with pytest.raises(ValueError, match="without error feedback"):
        QuantizedGradients(net.named_parameters(), QuantizedReducer(feedback=True))
    with pytest.raises(ValueError, match="need one"):
        QuantizedGradients([])
    with pytest.raises(ValueError, match="bucket_elements"):
        QuantizedGradients(net.named_parameters(), bucket_elements=0)
    held = gradients(net)
    with pytest.raises(ValueError, match="shape"):
        held.add_("1.weight", torch.zeros(3))
    with pytest.raises(ValueError, match="shape"):
        held.add_("0.weight", torch.zeros(24, 40))
    with pytest.raises(TypeError, match="dtype"):
        held.add_("0.weight", torch.zeros(40, 24, dtype=torch.int32))
