"""Shared test set-up: one thread per process, so that bits do not depend on the machine's core count."""

import torch

torch.set_num_threads(1)
