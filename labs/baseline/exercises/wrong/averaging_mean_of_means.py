"""Wrong: every rank counts the same, however little it saw."""

import torch


def combine(gradients, rows):
    return torch.stack(gradients).mean(0)
