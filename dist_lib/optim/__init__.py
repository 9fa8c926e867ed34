"""Optimizers on one device: Muon, what it must not touch, and schedules.

:class:`Muon` orthogonalises momentum and updates whole matrices; :func:`split_parameters` says which parameters those
are; :class:`MuonWithAdamW` is both in one line; :func:`warmup_cosine` is the schedule of the labs. Nothing here talks
to other processes: average the gradients first.
"""

from dist_lib.optim.combined import MuonWithAdamW
from dist_lib.optim.muon import Muon, gradients_finite, next_momentum
from dist_lib.optim.routing import ParameterSplit, split_parameters
from dist_lib.optim.scales import SCALES, update_scale
from dist_lib.optim.schedules import warmup_cosine

__all__ = [
    "SCALES",
    "Muon",
    "MuonWithAdamW",
    "ParameterSplit",
    "gradients_finite",
    "next_momentum",
    "split_parameters",
    "update_scale",
    "warmup_cosine",
]
