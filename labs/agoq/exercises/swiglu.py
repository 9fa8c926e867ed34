"""Exercise: the backward pass of SwiGLU and the product behind it, from codes alone.

Fill in the function, then run ``python -m labs check agoq swiglu``.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dist_lib.checks import NotSolvedYet


def backward(
    grad: Tensor, gate_codes: Any, up_codes: Any, weight: Tensor, decode: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``y = (silu(gate) * up) @ weight.T`` with ``silu(v) = v * sigmoid(v)``.

    Of the forward pass nothing was kept but ``gate`` and ``up``, encoded. The sigmoid, its product with the gate, and
    the product that ``weight`` was multiplied with are gone; rebuild what you need from the decoded numbers. Decoding
    is a pass over memory: do it once for each of the two.

    Args:
        grad: of y, (tokens, D), float32 or float64.
        gate_codes, up_codes: what was kept.
        weight: (D, F).
        decode: turns what was kept into a (tokens, F) tensor of the dtype of ``grad``.

    Returns:
        Gradients of gate, of up, both (tokens, F), and of the weight, (D, F). All finite for gates of any size.
    """
    raise NotSolvedYet("what is the slope of silu, and which product did the weight see?")
