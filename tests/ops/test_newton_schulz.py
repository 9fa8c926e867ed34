"""Newton-Schulz against singular values in float64, over a zoo of matrices and all coefficient sets."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dist_lib.ops import (
    COEFFICIENTS,
    choose_form,
    commuting_product,
    newton_schulz,
    newton_schulz_flops,
    polar_express,
    polynomial,
    resolve,
    scalar_map,
    symmetric_matmul,
)

# Bands after five steps for singular values from the floor to 1, by scalar iteration (coefficients: see the sources).
BANDS = {
    "keller": (3e-3, 0.68, 1.21),
    "you": (1e-2, 0.977, 1.033),
    "polar_express": (3e-3, 0.846, 1.124),
    "polar_express_raw": (3e-3, 0.876, 1.124),
    "polar_express_dion": (3e-3, 0.85, 1.145),
}
RAW = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
DION = [
    (8.15655, -22.48329, 15.87877),
    (4.04293, -2.80892, 0.50002),
    (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449),
    (2.34654, -1.70978, 0.42324),
]


def _spectrum(rows, cols, values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    m = min(rows, cols)
    u = torch.linalg.qr(torch.randn(rows, m, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(cols, m, generator=generator, dtype=torch.float64))[0]
    return (u * values @ v.T).float()


def _zoo():
    g = torch.Generator().manual_seed(1)
    logs = torch.logspace(0, -6, 24, dtype=torch.float64)
    return {
        "wide": torch.randn(24, 60, generator=g),
        "tall": torch.randn(60, 24, generator=g),
        "square": torch.randn(32, 32, generator=g),
        "spectrum to 1e-6": _spectrum(24, 40, logs),
        "rank 3": _spectrum(24, 40, torch.tensor([1.0, 0.5, 0.1] + [0.0] * 21, dtype=torch.float64)),
        "one row": torch.randn(1, 17, generator=g),
        "one column": torch.randn(17, 1, generator=g),
        "one number": torch.tensor([[-3.0]]),
        "huge": torch.randn(8, 20, generator=g) * 1e30,
        "tiny": torch.randn(8, 20, generator=g) * 1e-30,
        "strided": torch.randn(40, 48, generator=g).t()[::2, 1:],
    }


ZOO = _zoo()


def _through_svd(x, triples):
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    return u @ torch.diag(torch.from_numpy(scalar_map(s.numpy(), triples))) @ vt


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("name", ZOO)
def test_equals_the_scalar_map_on_singular_values(name, form):
    x = ZOO[name]
    before = x.clone()
    for coefficients in COEFFICIENTS:
        expected = _through_svd(x, resolve(coefficients, 5))
        found = newton_schulz(x, coefficients=coefficients, form=form)
        assert found.shape == x.shape and torch.equal(x, before)
        # At a singular value of 1 the polynomials are so steep that they multiply float32's rounding by thousands.
        assert float((found - expected).norm() / expected.norm()) < 1e-2, coefficients
        exact = newton_schulz(x, coefficients=coefficients, form=form, compute_dtype=torch.float64)
        assert float((exact - expected).norm() / expected.norm()) < 1e-5, coefficients


@pytest.mark.parametrize("name", ["wide", "tall", "spectrum to 1e-6"])
def test_float32_is_no_worse_than_the_plain_torch_loop(name):
    x = ZOO[name]
    triples = resolve("keller", 5)
    expected = _through_svd(x, triples)
    plain = x.T if x.shape[0] > x.shape[1] else x
    plain = plain / plain.norm()
    for a, b, c in triples:
        gram = plain @ plain.T
        plain = a * plain + (b * gram + c * gram @ gram) @ plain
    plain = plain.T if x.shape[0] > x.shape[1] else plain
    ours = newton_schulz(x, coefficients="keller", form="direct")
    assert (ours - expected).norm() <= 1.5 * (plain - expected).norm() + 1e-6 * expected.norm()


@pytest.mark.parametrize("name", BANDS)
def test_bands(name):
    floor, low, high = BANDS[name]
    y = scalar_map(np.geomspace(floor, 1, 20_001), resolve(name, 5))
    assert low <= y.min() and y.max() <= high


def test_the_recipe_regenerates_the_published_rows():
    np.testing.assert_allclose(polar_express(5), RAW, rtol=1e-10)
    np.testing.assert_allclose(polar_express(5, cushion=0.02, safety=1.02), DION, atol=6e-6)
    safe = [(a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in RAW]
    np.testing.assert_allclose(resolve("polar_express", 5), safe, rtol=1e-10)


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 8, 12, 20])
def test_more_steps_never_widen_the_band(steps):
    x = np.geomspace(1e-3, 1, 5001)
    now = np.abs(scalar_map(x, polar_express(steps)) - 1).max()
    more = np.abs(scalar_map(x, polar_express(steps + 1)) - 1).max()
    assert more < now or now < 1e-9


def test_every_step_is_minimax_on_its_interval():
    a, b, c = polar_express(1, lower=0.1, cushion=0.0)[0]
    x = np.linspace(0.1, 1, 200_001)
    error = a * x + b * x**3 + c * x**5 - 1
    extremes = [error[0], error.max(), error[1:-1].min(), error[-1]]
    np.testing.assert_allclose(np.abs(extremes), np.abs(extremes[0]), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 3.0, 1e12, 1e30])
def test_the_direction_does_not_depend_on_the_scale(scale):
    x = ZOO["wide"]
    power = 2.0 ** round(np.log2(scale))  # a power of two moves no bit of the mantissa
    assert torch.equal(newton_schulz(x * power), newton_schulz(x))


def test_zero_stays_zero_and_poison_stays_at_home():
    x = torch.randn(4, 5, 9, generator=torch.Generator().manual_seed(2))
    clean = newton_schulz(x)
    x[1] = 0
    x[2, 3, 4] = float("nan")
    x[3, 0, 0] = float("inf")
    out = newton_schulz(x)
    assert torch.equal(out[0], clean[0]) and not out[1].any()
    assert out[2].isnan().all() and out[3].isnan().all()
    assert torch.equal(x[1], torch.zeros(5, 9))


def test_autocast_does_not_reach_the_products():
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(8))
    for form in ("direct", "gram"):
        plain = newton_schulz(x, form=form)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(newton_schulz(x, form=form), plain)


def test_it_traces_as_one_graph():
    x = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(9))
    for form in ("direct", "gram"):
        traced = torch.compile(newton_schulz, backend="eager", fullgraph=True)
        assert torch.equal(traced(x, form=form), newton_schulz(x, form=form))
        given = [(3.0, -3.2, 1.2)] * 5
        assert torch.equal(traced(x, form=form, coefficients=given), newton_schulz(x, form=form, coefficients=given))


@pytest.mark.parametrize("shape", [(5, 15), (7, 97), (64, 64), (33, 12)])
@pytest.mark.parametrize("form", ["direct", "gram"])
def test_a_result_does_not_depend_on_its_batch_mates(shape, form):
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(3))
    together = newton_schulz(x, form=form)
    for count in (1, 2, 3):
        assert torch.equal(newton_schulz(x[:count], form=form), together[:count])
    assert torch.equal(newton_schulz(x[5], form=form), together[5])


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_transposed_in_transposed_out(form):
    x = ZOO["wide"]
    assert torch.equal(newton_schulz(x.t(), form=form), newton_schulz(x, form=form).t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    x = ZOO["wide"].to(dtype)
    out = newton_schulz(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), newton_schulz(x.float()).to(dtype).float())


def test_half_precision_needs_the_restart():
    x = ZOO["spectrum to 1e-6"]
    exact = newton_schulz(x, form="direct")

    def error(**more):
        return float((newton_schulz(x, compute_dtype=torch.float16, **more) - exact).norm() / exact.norm())

    direct, restarted, never = error(form="direct"), error(form="gram"), error(form="gram", restarts=())
    assert direct < 0.05 and restarted < 0.5
    assert never > restarted > direct


@pytest.mark.parametrize("shape", [(64, 96), (128, 384)])
def test_half_precision_gram_is_near_the_direct_form(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    exact = newton_schulz(x, compute_dtype=torch.float64)

    def error(form):
        return float((newton_schulz(x, form=form, compute_dtype=torch.float16) - exact).norm() / exact.norm())

    # A factor a of P = a I + ... that is rounded for the whole diagonal alone makes it 4 times.
    assert error("gram") < 2.5 * error("direct")


@pytest.mark.parametrize("restarts", [(), (2,), (1, 3), (0, 9)])
@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_flop_formula_equals_the_counter(shape, form, restarts):
    with FlopCounterMode(display=False, custom_mapping=_CUSTOM) as counter:
        newton_schulz(torch.randn(*shape), form=form, restarts=restarts)
    assert counter.get_total_flops() == newton_schulz_flops(*shape, form=form, restarts=restarts)


_CUSTOM = {  # torch cannot look into a custom operator: one product each
    torch.ops.dist_lib.symmetric_matmul: lambda x, out_shape=None, **_: 2 * x[0] * x[1] * x[1] * x[2],
    torch.ops.dist_lib.symmetric_product: lambda g, *_, out_shape=None, **__: 2 * g[0] * g[1] ** 3,
    torch.ops.dist_lib.symmetric_polynomial: lambda g, *_, out_shape=None, **__: 2 * g[0] * g[1] ** 3,
}


def test_flop_table():
    m, n = 10, 30
    assert newton_schulz_flops(m, n) == 20 * m * m * n + 10 * m**3
    assert newton_schulz_flops(m, n, symmetric=True) == 15 * m * m * n + 5 * m**3
    assert newton_schulz_flops(m, n, form="gram") == 8 * m * m * n + 28 * m**3
    assert newton_schulz_flops(m, n, form="gram", symmetric=True) == 6 * m * m * n + 14 * m**3
    assert newton_schulz_flops(m, n, form="gram", restarts=()) == 4 * m * m * n + 34 * m**3
    assert newton_schulz_flops(m, n, form="gram", symmetric=True, restarts=()) == 3 * m * m * n + 17 * m**3
    assert choose_form(100, 150) == "direct" and choose_form(100, 151) == "gram"
    assert choose_form(100, 100, symmetric=True) == "direct" and choose_form(101, 100, symmetric=True) == "gram"


def test_blocks_of_a_matrix_are_not_the_matrix():
    x = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    whole = newton_schulz(x, coefficients="polar_express", steps=12)
    blocks = torch.cat([newton_schulz(row[None], steps=12) for row in x])
    exact = torch.linalg.svd(x)
    assert (whole - exact.U @ exact.Vh).norm() < 0.2 < 0.5 < (blocks - exact.U @ exact.Vh).norm()


def test_operators_are_well_formed():
    x = torch.randn(2, 5, 7)
    gram = x @ x.mT
    torch.library.opcheck(symmetric_matmul, (x,))
    torch.library.opcheck(polynomial, (gram, 0.5, -1.0, 2.0))
    torch.library.opcheck(commuting_product, (gram, gram @ gram, gram, 0.5))
    for call in (lambda: polynomial(x, 1.0, 1.0, 1.0), lambda: commuting_product(gram, gram, x, 1.0)):
        with pytest.raises(RuntimeError, match="batch, m, m"):
            call()
    eye = torch.eye(5)
    torch.testing.assert_close(polynomial(gram, 0.5, -1.0, 2.0), 0.5 * eye - gram + 2 * gram @ gram)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: newton_schulz(torch.zeros(3)), ValueError, "batch"),
        (lambda: newton_schulz(torch.zeros(2, 2, dtype=torch.int32)), TypeError, "floating"),
        (lambda: newton_schulz(torch.zeros(2, 2), coefficients="best"), ValueError, "keller"),
        (lambda: newton_schulz(torch.zeros(2, 2), coefficients=[(1, 2, 3)]), ValueError, "1 triples for 5"),
        (lambda: newton_schulz(torch.zeros(2, 2), coefficients="you", steps=6), ValueError, "5 steps"),
        (lambda: newton_schulz(torch.zeros(2, 2), form="fast"), ValueError, "'auto'"),
        (lambda: newton_schulz(torch.zeros(2, 2), steps=0), ValueError, "at least 1"),
        (lambda: newton_schulz(torch.zeros(2, 2), compute_dtype=torch.int8), TypeError, "float64"),
        (lambda: polar_express(3, lower=2.0), ValueError, "0 < lower"),
    ],
)
def test_bad_input_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_empty():
    assert newton_schulz(torch.zeros(0, 4)).shape == (0, 4)
    assert newton_schulz(torch.zeros(3, 4, 0)).shape == (3, 4, 0)
