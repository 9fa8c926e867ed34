"""Faults that others have published about Muon: each kind must be impossible, or refused, here."""

import copy
import io
import itertools

import pytest
import torch

from dist_lib.comm import ExactReducer, distributed, launch
from dist_lib.ops import newton_schulz
from dist_lib.optim import Muon

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY_TO_HUGE = (1e-30, 1e-20, 1e-8, 1e8, 1e20, 1e30)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_with(gradient, weight=None, **options):
    p = torch.nn.Parameter(torch.zeros_like(gradient) if weight is None else weight.clone())
    optimizer = Muon([p], lr=1.0, weight_decay=0.0, **options)
    p.grad = gradient.clone()
    optimizer.step()
    return p.detach(), optimizer


@pytest.mark.parametrize(
    "dtype, nesterov, form, shape",
    list(itertools.product(DTYPES, [True, False], ["heavy_ball", "ema"], [(6, 10), (10, 6), (1, 8)])),
    ids=str,
)
def test_momentum_is_the_recurrence_bit_for_bit_and_the_gradient_is_untouched(dtype, nesterov, form, shape):
    """torch normalises the buffer in place for bfloat16 without Nesterov; here nothing shares memory with it."""
    p = torch.nn.Parameter(randn(*shape, dtype=dtype))
    optimizer = Muon([p], lr=0.1, momentum=0.9, nesterov=nesterov, momentum_form=form)
    expected = torch.zeros(shape)
    for step in range(4):
        gradient = randn(*shape, seed=step + 1, dtype=dtype)
        p.grad = gradient.clone()
        optimizer.step()
        if form == "ema":
            expected = expected.lerp(gradient.float(), 1 - 0.9)
        else:
            expected = expected.mul(0.9).add(gradient.float())
        assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)
        assert torch.equal(p.grad, gradient)


def test_the_buffer_check_would_catch_an_aliased_momentum():
    """Proof that the check above can fail: torch's own step breaks it in the published case."""
    p = torch.nn.Parameter(randn(6, 10, dtype=torch.bfloat16))
    reference = torch.optim.Muon([p], lr=0.1, momentum=0.9, nesterov=False)
    p.grad = randn(6, 10, seed=1, dtype=torch.bfloat16)
    expected = torch.zeros_like(p).lerp(p.grad, 1 - 0.9)
    reference.step()
    if torch.equal(reference.state[p]["momentum_buffer"], expected):
        pytest.skip(f"torch {torch.__version__} has repaired its Muon")
    assert not torch.allclose(reference.state[p]["momentum_buffer"], expected, rtol=0.01)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (5, 5), (1, 7), (3, 4, 6)], ids=str)
def test_the_update_does_not_depend_on_the_size_of_the_gradient(shape):
    gradient = randn(*shape)
    expected, _ = step_with(gradient)
    assert float(expected.norm()) > 0.1
    for size in TINY_TO_HUGE:
        found, _ = step_with(gradient * size)
        assert float((found - expected).norm() / expected.norm()) < 1e-5, f"gradients times {size}"


def test_zero_in_zero_out():
    for options in ({}, {"momentum_form": "ema"}, {"nesterov": False}):
        found, _ = step_with(torch.zeros(4, 6), weight=torch.ones(4, 6), **options)
        assert torch.equal(found, torch.ones(4, 6))


@pytest.mark.parametrize("dtype, top", [(torch.float16, 6e4), (torch.bfloat16, 1e30)])
def test_large_half_precision_gradients_are_normalised_before_anything_overflows(dtype, top):
    gradient = (randn(8, 16).clamp(-1, 1) * top).to(dtype)
    found, _ = step_with(gradient)
    expected, _ = step_with(gradient.float() / top)
    assert torch.isfinite(found).all()
    assert float((found.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)], ids=str)
def test_empty_matrices_do_nothing(shape):
    found, optimizer = step_with(torch.zeros(shape))
    assert found.shape == shape and optimizer.orthogonalised == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15])
def test_any_number_of_rows_and_columns(rows):
    for shape in ((rows, 8), (8, rows), (rows, 1), (1, rows)):
        found, _ = step_with(randn(*shape))
        singular = torch.linalg.svdvals(found / (0.2 * max(shape) ** 0.5))
        assert torch.isfinite(found).all() and 0.5 < float(singular.max()) < 1.3


def test_scalars_and_vectors_are_refused_also_later():
    ok = torch.nn.Parameter(torch.zeros(2, 2))
    for shape in ((), (4,)):
        bad = torch.nn.Parameter(torch.zeros(shape))
        with pytest.raises(ValueError, match="give vectors and scalars to AdamW"):
            Muon([bad])
        optimizer = Muon([("first", ok)])
        with pytest.raises(ValueError, match=r"norm\.weight has shape"):
            optimizer.add_param_group({"params": [("norm.weight", bad)]})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="flatten=True"):
        Muon([torch.nn.Parameter(torch.zeros(4, 3, 2, 2))])


def test_wrong_split_sizes_are_refused():
    with pytest.raises(ValueError, match=r"12 rows; split_sizes = \(4, 4\) sum to 8"):
        Muon([torch.nn.Parameter(torch.zeros(12, 4))], split_sizes=(4, 4))
    with pytest.raises(ValueError, match="rows of each block"):
        Muon([torch.nn.Parameter(torch.zeros(12, 4))], split_sizes=(12, 0))


def test_every_matrix_is_orthogonalised_exactly_once_a_step():
    shapes = [(6, 10), (6, 10), (10, 6), (4, 6, 10), (1, 5)]
    params = [torch.nn.Parameter(randn(*s)) for s in shapes]
    optimizer = Muon(params, lr=0.5, weight_decay=0.0, scale="original", momentum=0.0)
    for step in range(1, 4):
        for p in params:
            p.grad = randn(*p.shape, seed=step)
        optimizer.step()
        assert optimizer.orthogonalised == step * (1 + 1 + 1 + 4 + 1)
    found, _ = step_with(randn(32, 48), scale="original")
    assert torch.linalg.svdvals(found).max() / torch.linalg.svdvals(found).min() < 2, "it was not orthogonalised"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_restart_goes_on_as_if_nothing_had_happened(dtype):
    """Momentum is saved, and in its own dtype: torch would cast it to that of the weights."""

    def run(restart):
        p = torch.nn.Parameter(randn(6, 10, dtype=dtype))
        optimizer = Muon([p], lr=0.05)
        for step in range(6):
            if restart and step == 3:
                file = io.BytesIO()
                torch.save({"weights": p.detach(), "optimizer": optimizer.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                p = torch.nn.Parameter(saved["weights"])
                optimizer = Muon([p], lr=123.0)
                optimizer.load_state_dict(saved["optimizer"])
                assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
            p.grad = randn(6, 10, seed=step + 1, dtype=dtype)
            optimizer.step()
        return p.detach()

    assert torch.equal(run(restart=True), run(restart=False))


class FakeDTensor(torch.nn.Parameter):
    placements = ("Shard(0)",)


def test_a_shard_of_a_matrix_is_refused():
    with pytest.raises(ValueError, match="a shard of a matrix must not be orthogonalised on its own"):
        Muon([FakeDTensor(torch.zeros(4, 4))])


def test_real_dtensors_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with distributed(device="cpu"):
        mesh = init_device_mesh("cpu", (1,))
        p = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="DTensor"):
            Muon([p])


def train_on_rank(steps, average):
    with distributed(device="cpu") as ctx:
        params = [torch.nn.Parameter(randn(*s)) for s in ((6, 10), (15, 4), (1, 7))]
        optimizer = Muon(params, lr=0.1)
        equal = True
        for step in range(steps):
            for i, p in enumerate(params):  # integers: their sum is exact in any order
                p.grad = randn(*p.shape, seed=100 * step + 10 * i + ctx.rank).mul(8).round()
                if average:
                    ExactReducer().all_reduce(p.grad)
            optimizer.step()
            for p in params:
                copies = [torch.empty_like(p) for _ in range(ctx.world_size)]
                torch.distributed.all_gather(copies, p.detach())
                equal &= all(torch.equal(c, copies[0]) for c in copies)
        return [p.detach() for p in params], equal


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_their_twin_and_one_another_bit_for_bit(world_size):
    ranks = launch(train_on_rank, world_size=world_size, args=(4, True))
    params = [torch.nn.Parameter(randn(*s)) for s in ((6, 10), (15, 4), (1, 7))]
    optimizer = Muon(params, lr=0.1)
    for step in range(4):
        for i, p in enumerate(params):
            parts = [randn(*p.shape, seed=100 * step + 10 * i + r).mul(8).round() for r in range(world_size)]
            p.grad = torch.stack(parts).sum(0) / world_size
        optimizer.step()
    for weights, equal in ranks:
        assert equal
        assert all(torch.equal(a, b.detach()) for a, b in zip(weights, params, strict=True))


def test_gradients_that_were_not_averaged_are_seen():
    assert not any(equal for _, equal in launch(train_on_rank, world_size=2, args=(1, False)))


def test_local_newton_schulz_on_row_shards_is_another_update():
    n = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    whole = newton_schulz(n[None], steps=5)[0]
    shards = torch.cat([newton_schulz(row[None, None], steps=5)[0] for row in n])
    assert float((whole @ whole.T - torch.eye(2)).norm()) < 0.3
    assert float((shards @ shards.T - torch.eye(2)).norm()) > 0.8


def test_nothing_changes_when_a_gradient_is_not_finite():
    for bad in (float("nan"), float("inf")):
        params = [torch.nn.Parameter(randn(4, 6, seed=s)) for s in range(2)]
        optimizer = Muon(params, lr=0.1)
        for p in params:
            p.grad = randn(4, 6, seed=5)
        optimizer.step()
        weights, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        params[1].grad[2, 3] = bad
        with pytest.raises(FloatingPointError, match="nothing was changed"):
            optimizer.step()
        optimizer.param_groups[0]["nonfinite"] = "skip"
        optimizer.step()
        assert optimizer.skipped_steps == 1
        for p, w in zip(params, weights, strict=True):
            assert torch.equal(p.detach(), w)
        for key, saved in state["state"].items():
            assert torch.equal(optimizer.state_dict()["state"][key]["momentum_buffer"], saved["momentum_buffer"])
        optimizer.param_groups[0]["nonfinite"] = "propagate"
        optimizer.step()
        assert not torch.isfinite(params[1]).all() and torch.isfinite(params[0]).all()


def test_a_step_that_a_gradient_scaler_discards_leaves_momentum_clean():
    p = torch.nn.Parameter(randn(4, 6))
    optimizer = Muon([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = randn(3, 6)

    def step(factor):
        optimizer.zero_grad()
        scaler.scale((x @ p.T).square().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    weights, momentum = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    step(float("inf"))
    assert torch.equal(p.detach(), weights) and torch.equal(optimizer.state[p]["momentum_buffer"], momentum)
    assert scaler.get_scale() < 4.0
    step(1.0)
    assert not torch.equal(p.detach(), weights) and torch.isfinite(p).all()
