"""Exercise: the FLOPs and the AdamW bytes of a training step, from the shape of the model.

Fill in the two functions, then run ``python -m labs check baseline flops``. Do not call dist_lib's own counting.
"""

from dist_lib.checks import NotSolvedYet
from dist_lib.models import DecoderConfig


def step_flops(config: DecoderConfig, batch: int, seq: int) -> int:
    """FLOPs of all matrix products of one step, forward and backward; one multiply-add counts two.

    Attention scores count in full (no causal half). The embedding look-up is not a product.
    """
    raise NotSolvedYet("start with one linear layer: how many multiply-adds for one token?")


def adamw_bytes(config: DecoderConfig) -> int:
    """Bytes of float32 weights, gradients and AdamW's state together; a tied head is stored once."""
    raise NotSolvedYet("what does AdamW keep for each parameter?")
