"""RMSNorm and SwiGLU around codes, in plain torch: equal to autograd on the decoded tensors."""

import pytest
import torch
import torch.nn.functional as F

from dist_lib.models.decoder import RMSNorm
from dist_lib.ops import (
    quantize,
    rms_norm_backward,
    rms_norm_quantize,
    swiglu_backward,
    swiglu_quantize,
    weight_gradient,
)


def _norm(dim, dtype=torch.float32):
    norm = RMSNorm(dim, 1e-5)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(dim, generator=torch.Generator().manual_seed(5)))
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", ["fp4", "int5", "int4_minmax"])
def test_the_forward_pass_is_the_plain_norm_bit_for_bit_and_the_codes_are_of_its_input(codec, dtype):
    x = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = _norm(70, dtype)
    y, factor, q = rms_norm_quantize(x, norm.weight, norm.eps, codec, 32, torch.float16)
    plain = quantize(x, codec, 32, torch.float16)
    assert torch.equal(y, norm(x)) and y.dtype == dtype
    assert torch.equal(q.codes, plain.codes) and torch.equal(q.scales, plain.scales) and q.shape == x.shape
    torch.testing.assert_close(factor, (x.float().square().mean(-1) + 1e-5).rsqrt().flatten(), rtol=1e-6, atol=0)


def test_the_backward_pass_of_the_norm_is_autograds_on_the_decoded_row_with_the_exact_factor():
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))
    norm = _norm(96)
    _, factor, q = rms_norm_quantize(x, norm.weight, norm.eps, "int8", 32)
    grad = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(2))
    grad_x, grad_weight, y = rms_norm_backward(q, factor, norm.weight, grad)
    # Given the decoded row's own factor it is autograd's result; the exact factor changes it a little.
    decoded = q.dequantize().requires_grad_()
    own = (decoded.detach().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    reference = norm(decoded)
    reference.backward(grad)
    again = rms_norm_backward(q, own.flatten(), norm.weight, grad)
    torch.testing.assert_close(again[0], decoded.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again[1], norm.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again[2], reference.detach(), rtol=1e-6, atol=1e-7)
    n = decoded.detach() * factor.view(2, 5, 1)
    torch.testing.assert_close(y, n * norm.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad_weight, (grad * n).sum((0, 1)), rtol=1e-5, atol=1e-6)
    assert not torch.equal(grad_x, again[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backward_pass_of_swiglu_is_autograds_on_the_decoded_tensors(dtype):
    g = torch.Generator().manual_seed(3)
    gate, up, grad = (torch.randn(4, 70, generator=g).to(dtype) for _ in range(3))
    codes = [quantize(t, "nf4", 32) for t in (gate, up)]
    out = swiglu_backward(*codes, grad)
    a, b = (q.dequantize(torch.float32).requires_grad_() for q in codes)
    product = F.silu(a) * b
    product.backward(grad.float())
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    for ours, theirs in zip(out, (a.grad, b.grad, product.detach()), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, **tolerance)


def test_unlike_gate_and_up_are_refused():
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match="need the same"):
        swiglu_backward(quantize(x), quantize(x, "nf4"), x)


def test_registered_operations_pass_torchs_checks():
    x, w = torch.randn(3, 70), torch.ones(70)
    tests = ("test_schema", "test_faketensor")
    args = (x, w, 1e-5, "int5", 32, True, -1)
    torch.library.opcheck(torch.ops.dist_lib.rms_norm_quantize, args, test_utils=tests)
    _, factor, codes, scales = torch.ops.dist_lib.rms_norm_quantize(*args)
    back = (codes, scales, factor, w, x, "int5", 32)
    torch.library.opcheck(torch.ops.dist_lib.rms_norm_backward, back, test_utils=tests)
    both = (codes, scales, codes, scales, x, "int5", 32)
    torch.library.opcheck(torch.ops.dist_lib.swiglu_backward, both, test_utils=tests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_that_encodes_gives_the_plain_product_and_the_plain_codes(dtype):
    g = torch.Generator().manual_seed(4)
    gate, up = (torch.randn(2, 3, 70, generator=g).to(dtype) for _ in range(2))
    product, *coded = swiglu_quantize(gate, up, "nf4", 32, torch.float16)
    assert torch.equal(product, F.silu(gate) * up)
    for q, x in zip(coded, (gate, up), strict=True):
        plain = quantize(x, "nf4", 32, torch.float16)
        assert torch.equal(q.codes, plain.codes) and torch.equal(q.scales, plain.scales) and q.shape == x.shape
    with pytest.raises(ValueError, match="need the same"):
        swiglu_quantize(gate, up[..., :3])
    with pytest.raises(ValueError, match="fused=False"):
        swiglu_quantize(gate, up, fused=True)


def test_the_weight_gradient_from_codes_is_autograds_on_the_decoded_input():
    g = torch.Generator().manual_seed(6)
    x, grad = torch.randn(2, 5, 70, generator=g), torch.randn(2, 5, 9, generator=g)
    q = quantize(x, "fp4", 32)
    weight = torch.zeros(9, 70, requires_grad=True)
    F.linear(q.dequantize(), weight).backward(grad)
    torch.testing.assert_close(weight_gradient(grad, q), weight.grad, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="leading dimensions"):
        weight_gradient(grad[:1], q)
    with pytest.raises(ValueError, match="fused=False"):
        weight_gradient(grad, q, fused=True)
