"""What the two exercises must do."""

from types import ModuleType

import torch

from dist_lib.checks import Check
from dist_lib.models import DecoderConfig, get_config, parameter_counts, training_flops

ODD = DecoderConfig(
    vocab_size=37, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=20, max_seq_len=64, tie_embeddings=True
)


def _equal(found: object, expected: int, what: str) -> None:
    assert isinstance(found, int), f"{what} should be an int, got {type(found).__name__}"
    assert found == expected, f"{what} is off by a factor of {found / expected:.4f}"


def _flops(module: ModuleType) -> None:
    for config, batch, seq in ((get_config("llama3-8b"), 2, 4096), (ODD, 3, 11)):
        _equal(module.step_flops(config, batch, seq), training_flops(config, batch, seq).total, "the number of FLOPs")


def _long(module: ModuleType) -> None:
    config = get_config("tiny-0.3m")
    growth = module.step_flops(config, 1, 256) - 2 * module.step_flops(config, 1, 128)
    expected = training_flops(config, 1, 256).total - 2 * training_flops(config, 1, 128).total
    assert growth == expected, "twice the sequence must cost more than twice the FLOPs, by what attention adds"


def _bytes(module: ModuleType) -> None:
    for config in (get_config("llama3-8b"), ODD):
        _equal(module.adamw_bytes(config), 16 * parameter_counts(config).total, "the number of bytes")


def _uneven(module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator).requires_grad_()
    inputs = torch.randn(9, 5, generator=generator)
    rows = [4, 1, 3, 1]
    parts = [torch.autograd.grad((x @ weight).square().mean(), weight)[0] for x in inputs.split(rows)]
    (expected,) = torch.autograd.grad((inputs @ weight).square().mean(), weight)
    found = module.combine(parts, rows)
    error = float((found - expected).norm() / expected.norm())
    assert error < 1e-5, f"differs from the gradient of the whole batch by {error:.1%}"


def _untouched(module: ModuleType) -> None:
    parts = [torch.ones(3), torch.full((3,), 2.0)]
    module.combine(parts, [1, 1])
    assert parts[0].tolist() == [1.0] * 3 and parts[1].tolist() == [2.0] * 3, "the gradients given were changed"


def _empty(module: ModuleType) -> None:
    found = module.combine([torch.full((2,), float("nan")), torch.ones(2)], [0, 5])
    assert found.tolist() == [1.0, 1.0], f"a rank without sequences must not matter, got {found.tolist()}"


CHECKS = {
    "flops": [
        Check("the FLOPs of a step", _flops, "forward 2, backward 4 for each weight and token; then attention"),
        Check("attention grows with the square of the sequence", _long, "scores and their product with the values"),
        Check("the bytes of an AdamW step", _bytes, "four float32 numbers a parameter; which parameters exist once?"),
    ],
    "averaging": [
        Check("uneven ranks give the gradient of the whole batch", _uneven, "weight each mean by what it is a mean of"),
        Check("the gradients given stay as they are", _untouched, "which of your operations ends in an underscore?"),
        Check("a rank without sequences does not matter", _empty, "0 times NaN is NaN"),
    ],
}
