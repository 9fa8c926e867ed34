"""Wrong: never folds; rounding makes the Gram matrix lose its meaning for small singular values."""

import torch


def gram_newton_schulz(x, triples, restarts):
    one = torch.eye(x.shape[0], dtype=x.dtype)
    gram, q = x @ x.T, one
    for a, b, c in triples:
        p = a * one + b * gram + c * (gram @ gram)
        q, gram = p @ q, p @ gram @ p
    return q @ x
