"""Muon as a torch optimizer: groups, closures, schedulers, state, and the state of torch.optim.Muon."""

import copy
import io

import pytest
import torch

from dist_lib.optim import Muon, warmup_cosine

KELLER = (3.4445, -4.7750, 2.0315)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=100 * step + i)
        optimizer.step()


def test_parameters_as_iterable_groups_and_named_pairs_give_the_same():
    def weights(make):
        params = [torch.nn.Parameter(randn(4, 6)), torch.nn.Parameter(randn(6, 4, seed=1))]
        optimizer = make(params)
        run(optimizer, params, 2)
        return [p.detach() for p in params], optimizer

    expected, _ = weights(lambda ps: Muon(iter(ps), lr=0.1))
    grouped, optimizer = weights(lambda ps: Muon([{"params": ps[0]}, {"params": [ps[1]], "lr": 0.1}], lr=0.1))
    named, with_names = weights(lambda ps: Muon([("a.weight", ps[0]), ("b.weight", ps[1])], lr=0.1))
    for other in (grouped, named):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))
    assert len(optimizer.param_groups) == 2
    assert with_names.param_groups[0]["param_names"] == ["a.weight", "b.weight"]
    slow, _ = weights(lambda ps: Muon([{"params": ps[0], "lr": 0.01}, {"params": [ps[1]]}], lr=0.1))
    assert not torch.equal(slow[0], expected[0]) and torch.equal(slow[1], expected[1])


def test_a_closure_is_evaluated_once_with_gradients():
    p = torch.nn.Parameter(randn(4, 6))
    optimizer, calls = Muon([p], lr=0.01), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert calls == [1] and optimizer.step(closure).item() < first.item()


def test_parameters_without_a_gradient_are_left_alone():
    used, unused = torch.nn.Parameter(randn(4, 6)), torch.nn.Parameter(randn(4, 6))
    optimizer = Muon([used, unused])
    used.grad = randn(4, 6, seed=1)
    optimizer.step()
    assert torch.equal(unused.detach(), randn(4, 6)) and unused not in optimizer.state
    optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert unused not in optimizer.state or not optimizer.state[unused]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"weight_decay": float("nan")}, "weight_decay = nan"),
        ({"ns_steps": 0}, "ns_steps = 0"),
        ({"scale": "rms"}, "scale = 'rms'; it must be one of original"),
        ({"momentum_form": "polyak"}, "must be one of heavy_ball, ema"),
        ({"nonfinite": "ignore"}, "must be one of raise, skip, propagate"),
        ({"ns_coefficients": "quintic"}, "quintic"),
        ({"ns_coefficients": (KELLER, KELLER)}, "triples for 5 steps"),
    ],
)
def test_wrong_options_say_what_is_allowed_also_in_a_later_group(options, message):
    p, q = (torch.nn.Parameter(randn(4, 6)) for _ in range(2))
    with pytest.raises(ValueError, match=message):
        Muon([p], **options)
    optimizer = Muon([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], **options})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="unknown option weight_decays"):
        optimizer.add_param_group({"params": [q], "weight_decays": 0.1})


def test_sparse_complex_and_integer_parameters_are_refused():
    with pytest.raises(TypeError, match="complex64"):
        Muon([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="sparse"):
        Muon([torch.nn.Parameter(torch.zeros(2, 2).to_sparse())])
    p = torch.nn.Parameter(randn(4, 6))
    optimizer = Muon([p])
    p.grad = torch.zeros(4, 6).to_sparse()
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()


def test_state_round_trip_continues_with_the_same_bits():
    def make():
        params = [torch.nn.Parameter(randn(4, 6)), torch.nn.Parameter(randn(3, 6, 4, seed=1))]
        return params, Muon([{"params": params[:1], "scale": "spectral"}, {"params": params[1:]}], lr=0.05)

    params, optimizer = make()
    run(optimizer, params, 6)
    cut, first = make()
    run(first, cut, 3)
    again, second = make()
    for p, q in zip(again, cut, strict=True):
        p.data.copy_(q)
    second.param_groups[0]["scale"] = "original"  # options come from the saved state
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    run(second, again, 3, first=3)
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(again, params, strict=True))
    copied = copy.deepcopy(second)
    assert copied.orthogonalised == 0 and len(copied.state_dict()["state"]) == 2


def test_loading_shares_no_memory_with_the_saved_state():
    p = torch.nn.Parameter(randn(4, 6))
    optimizer = Muon([p])
    run(optimizer, [p], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    before = saved["state"][0]["momentum_buffer"].clone()
    optimizer.load_state_dict(saved)
    run(optimizer, [p], 1)
    assert torch.equal(saved["state"][0]["momentum_buffer"], before)


def test_state_of_another_model_is_refused():
    p = torch.nn.Parameter(randn(4, 6))
    optimizer = Muon([p])
    run(optimizer, [p], 1)
    with pytest.raises(ValueError, match=r"shape \(4, 6\), its parameter \(6, 4\)"):
        Muon([torch.nn.Parameter(randn(6, 4))]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="same groups"):
        Muon([torch.nn.Parameter(randn(4, 6)) for _ in range(2)]).load_state_dict(optimizer.state_dict())
    broken = optimizer.state_dict()
    broken["param_groups"][0]["scale"] = "rms"
    with pytest.raises(ValueError, match="must be one of"):
        optimizer.load_state_dict(broken)


@pytest.mark.parametrize("form", ["heavy_ball", "ema"])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_the_state_of_torch_muon_is_converted(form, adjust):
    theirs, ours = torch.nn.Parameter(randn(8, 20)), torch.nn.Parameter(randn(8, 20))
    reference = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.01, adjust_lr_fn=adjust)
    run(reference, [theirs], 4)
    optimizer = Muon([ours], lr=9.0, momentum_form=form)
    optimizer.load_state_dict(saved_and_loaded(reference.state_dict()))
    ours.data.copy_(theirs)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.02, 0.9, 0.01)
    assert group["scale"] == (adjust or "original") and group["momentum_form"] == form
    assert group["ns_coefficients"] == (KELLER,) * 5
    buffer = reference.state[theirs]["momentum_buffer"]
    expected = buffer * 10 if form == "heavy_ball" else buffer
    torch.testing.assert_close(optimizer.state[ours]["momentum_buffer"], expected, rtol=1e-6, atol=1e-7)
    before = ours.detach().clone()
    run(reference, [theirs], 1, first=4)
    run(optimizer, [ours], 1, first=4)
    difference = (ours.detach() - theirs.detach()).norm() / (theirs.detach() - before).norm()
    assert float(difference) < 0.05
    optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))


def test_schedulers_and_tensor_learning_rates():
    def weights(lr):
        p = torch.nn.Parameter(randn(4, 6))
        optimizer = Muon([p], lr=lr)
        factor = warmup_cosine(total_steps=4, warmup_steps=1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        rates = []
        for step in range(4):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            run(optimizer, [p], 1, first=step)
            schedule.step()
        return p.detach(), rates

    number, rates = weights(0.1)
    tensor, tensor_rates = weights(torch.tensor(0.1))
    assert rates == pytest.approx([0.05, 0.1, 0.075, 0.025]) and tensor_rates == pytest.approx(rates)
    torch.testing.assert_close(number, tensor)
    p = torch.nn.Parameter(randn(4, 6))
    cycle = torch.optim.lr_scheduler.OneCycleLR(Muon([p]), max_lr=0.1, total_steps=5)
    cycle.optimizer.load_state_dict(saved_and_loaded(cycle.optimizer.state_dict()))


def test_the_schedule():
    factor = warmup_cosine(total_steps=10, warmup_steps=3, final=0.1)
    assert [factor(s) for s in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    values = [factor(s) for s in range(3, 14)]
    assert values == sorted(values, reverse=True) and values[-1] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shorter than the run"):
        warmup_cosine(total_steps=3, warmup_steps=3)
