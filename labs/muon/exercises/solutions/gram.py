"""Reference solution."""

import torch
from torch import Tensor


def gram_newton_schulz(x: Tensor, triples: list[tuple[float, float, float]], restarts: set[int]) -> Tensor:
    one = torch.eye(x.shape[0], dtype=x.dtype, device=x.device)
    gram, q = x @ x.T, one
    for step, (a, b, c) in enumerate(triples):
        if step in restarts and step > 0:
            x = q @ x
            gram, q = x @ x.T, one
        p = a * one + b * gram + c * (gram @ gram)
        q = p @ q
        gram = p @ gram @ p
    return q @ x
