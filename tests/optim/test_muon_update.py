"""What one step of Muon computes: against a written-out step, against torch, and for every way to cut a tensor."""

import itertools

import pytest
import torch

from dist_lib.ops import newton_schulz
from dist_lib.optim import Muon, update_scale
from dist_lib.optim import muon as muon_module

KELLER = (3.4445, -4.7750, 2.0315)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stepped(weights, gradients, **options):
    """Weights after one step for each list of gradients, and the optimizer."""
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = Muon(params, **{"lr": 0.1, "weight_decay": 0.0, **options})
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params], optimizer


@pytest.mark.parametrize("form, nesterov", list(itertools.product(["heavy_ball", "ema"], [True, False])))
def test_several_steps_equal_the_formula_written_out(form, nesterov):
    mu, lr, wd = 0.9, 0.05, 0.2
    weight = randn(6, 10)
    gradients = [randn(6, 10, seed=s) for s in range(1, 5)]
    expected, buffer = weight.clone(), torch.zeros(6, 10)
    for g in gradients:
        fresh = g if form == "heavy_ball" else (1 - mu) * g
        buffer = mu * buffer + fresh
        n = mu * buffer + fresh if nesterov else buffer
        update = newton_schulz(n[None])[0] * 0.2 * 10**0.5
        expected = (1 - lr * wd) * expected - lr * update
    options = {"lr": lr, "weight_decay": wd, "momentum": mu, "nesterov": nesterov, "momentum_form": form}
    (found,), _ = stepped([weight], [[g] for g in gradients], **options)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    (ascended,), _ = stepped([weight], [[-g] for g in gradients], maximize=True, **options)
    assert torch.equal(ascended, found)


@pytest.mark.parametrize("scale, adjust", [("original", None), ("match_rms_adamw", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 32), (64, 16), (16, 80)])
def test_against_torch_muon(shape, nesterov, scale, adjust):
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov}
    theirs, ours = (torch.nn.Parameter(randn(*shape)) for _ in range(2))
    reference = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **options)
    optimizer = Muon([ours], momentum_form="ema", scale=scale, ns_coefficients=KELLER, **options)
    for step in range(1, 5):
        theirs.grad, ours.grad = randn(*shape, seed=step), randn(*shape, seed=step)
        before, before_theirs = ours.detach().clone(), theirs.detach().clone()
        reference.step()
        optimizer.step()
        a, b = optimizer.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"]
        assert float((a - b).norm() / b.norm()) < 1e-6
        update, wanted = ours.detach() - before, theirs.detach() - before_theirs
        assert float((update - wanted).norm() / wanted.norm()) < 0.05  # torch iterates in bfloat16


def test_heavy_ball_and_average_give_the_same_weights():
    gradients = [[randn(12, 20, seed=s)] for s in range(1, 7)]
    (a,), heavy = stepped([randn(12, 20)], gradients, momentum_form="heavy_ball")
    (b,), ema = stepped([randn(12, 20)], gradients, momentum_form="ema")
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    heavy_buffer = next(iter(heavy.state.values()))["momentum_buffer"]
    ema_buffer = next(iter(ema.state.values()))["momentum_buffer"]
    torch.testing.assert_close(ema_buffer, heavy_buffer * 0.05)


def test_scales():
    assert update_scale("original", 20, 5) == pytest.approx(2.0) and update_scale("original", 5, 20) == 1.0
    assert update_scale("match_rms_adamw", 5, 100) == pytest.approx(2.0)
    assert update_scale("spectral", 5, 20) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="must be one of original"):
        update_scale("rms", 2, 2)
    for shape in ((64, 96), (96, 64), (64, 64)):
        (found,), _ = stepped([torch.zeros(shape)], [[randn(*shape)]], lr=1.0)
        assert 0.17 < float(found.square().mean().sqrt()) < 0.22  # the rule: RMS of the update is about 0.2


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "spectral"])
def test_fused_rows_equal_separate_parameters_with_the_scale_of_each_block(scale):
    sizes = (8, 4, 4)
    weight, gradients = randn(16, 12), [randn(16, 12, seed=s) for s in (1, 2)]
    (fused,), optimizer = stepped([weight], [[g] for g in gradients], split_sizes=sizes, scale=scale)
    blocks, _ = stepped(weight.split(sizes), [g.split(sizes) for g in gradients], scale=scale)
    assert torch.equal(fused, torch.cat(blocks))
    assert optimizer.orthogonalised == 2 * 3
    (whole,), _ = stepped([weight], [[g] for g in gradients], scale=scale)
    assert not torch.allclose(whole, fused, atol=1e-3)


def test_a_stack_of_experts_equals_separate_matrices():
    weight, grad = randn(5, 6, 9), randn(5, 6, 9, seed=1)
    (stack,), optimizer = stepped([weight], [[grad]])
    separate, _ = stepped(list(weight), [list(grad)])
    assert torch.equal(stack, torch.stack(separate))
    assert optimizer.orthogonalised == 5
    (split,), _ = stepped([weight], [[grad]], split_sizes=(2, 4))
    parts, _ = stepped([w[i] for w in weight for i in (slice(0, 2), slice(2, 6))],
                       [[g[i] for g in grad for i in (slice(0, 2), slice(2, 6))]])  # fmt: skip
    assert torch.equal(split, torch.stack([torch.cat(parts[i : i + 2]) for i in range(0, 10, 2)]))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution_kernels_are_flattened_on_request(layout):
    weight, grad = randn(8, 3, 3, 3), randn(8, 3, 3, 3, seed=1)
    kernel = weight.to(memory_format=layout)
    (found,), _ = stepped([kernel], [[grad.to(memory_format=layout)]], flatten=True)
    (matrix,), _ = stepped([weight.flatten(1)], [[grad.flatten(1)]])
    assert torch.equal(found.contiguous().flatten(1), matrix)
    (split,), _ = stepped([kernel], [[grad]], flatten=True, split_sizes=(4, 4))
    halves, _ = stepped(weight.flatten(1).split(4), [grad.flatten(1).split(4)])
    assert torch.equal(split.contiguous().flatten(1), torch.cat(halves))


def test_a_matrix_does_not_depend_on_its_batch_mates(monkeypatch):
    weights = [randn(7, 12, seed=s) for s in range(6)] + [randn(12, 7)]
    gradients = [randn(*w.shape, seed=20 + i) for i, w in enumerate(weights)]
    calls = []
    original = muon_module.newton_schulz
    monkeypatch.setattr(
        muon_module, "newton_schulz", lambda x, **options: calls.append(tuple(x.shape)) or original(x, **options)
    )
    together, _ = stepped(weights, [gradients])
    assert sorted(calls[1:]) == [(1, 12, 7), (6, 7, 12)], "equal shapes go in one batch"
    for index, w in enumerate(weights):
        (alone,), _ = stepped([w], [[gradients[index]]])
        assert torch.equal(alone, together[index])
    monkeypatch.setattr(muon_module, "BATCH_ELEMENTS", 2 * 7 * 12)
    calls.clear()
    small, _ = stepped(weights, [gradients])
    assert calls[1:].count((2, 7, 12)) == 3 and all(torch.equal(a, b) for a, b in zip(small, together, strict=True))


def test_half_precision_weights_are_rounded_once():
    weight, grad = randn(8, 16, dtype=torch.bfloat16), randn(8, 16, seed=1, dtype=torch.bfloat16)
    (found,), optimizer = stepped([weight], [[grad]], weight_decay=0.3)
    (wide,), _ = stepped([weight.float()], [[grad.float()]], weight_decay=0.3)
    assert next(iter(optimizer.state.values()))["momentum_buffer"].dtype == torch.float32
    assert float((found.float() - wide).abs().max()) <= float(wide.abs().max()) * 2**-8
