"""Right, written differently: without an identity matrix, and without the product that nobody needs."""

import torch


def gram_newton_schulz(x, triples, restarts):
    gram, q = x @ x.T, None
    for step, (a, b, c) in enumerate(triples):
        if q is not None and step in restarts:
            x, q = q @ x, None
            gram = x @ x.T
        z = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        q = z + a * torch.eye(len(z), dtype=z.dtype) if q is None else torch.addmm(q, z, q, beta=a)
        t = torch.addmm(gram, gram, z, beta=a)
        gram = torch.addmm(t, z, t, beta=a)
    return q @ x
