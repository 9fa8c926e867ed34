"""Wrong: multiplies the Gram matrix on one side only."""

import torch


def gram_newton_schulz(x, triples, restarts):
    one = torch.eye(x.shape[0], dtype=x.dtype)
    gram, q = x @ x.T, one
    for step, (a, b, c) in enumerate(triples):
        if step in restarts and step > 0:
            x = q @ x
            gram, q = x @ x.T, one
        p = a * one + b * gram + c * (gram @ gram)
        q, gram = p @ q, p @ gram
    return q @ x
