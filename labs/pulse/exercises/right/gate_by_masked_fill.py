"""Right: the cast is done on bits, and both parts are made by filling in zeros."""

import numpy as np
import torch


def rounded(t):
    bits = t.contiguous().numpy().view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.int64)


def visible(theta, update):
    return torch.from_numpy(np.asarray(rounded(theta) != rounded(theta - update)))


def exchange(theta, local, error):
    update = error + (theta - local)
    mask = visible(theta, update)
    return update.masked_fill(~mask, 0.0), update.masked_fill(mask, 0.0)
