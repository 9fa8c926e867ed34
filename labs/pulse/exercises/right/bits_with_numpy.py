"""Right, with numpy: unsigned words, and a copy that is filled by position."""

import numpy as np
import torch


def words(t):
    return np.array(t.detach().contiguous().flatten().view(torch.int16).numpy()).view(np.uint16)


def changed(old, new):
    return torch.from_numpy(np.flatnonzero(words(old) ^ words(new)).astype(np.int64))


def apply(base, positions, values):
    made = words(base)
    np.put(made, positions.numpy(), words(values))
    return torch.from_numpy(made.view(np.int16)).view(torch.bfloat16).reshape(base.shape)
