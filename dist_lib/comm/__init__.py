"""Processes and what they say to each other.

Start processes (:func:`launch`) or find out where this one stands (:func:`distributed`); speak through
``collectives``; count every byte (:class:`CommCounter`); agree on a plan before acting on it (:func:`agree`); reduce
gradients through a seam that other packages can replace (:class:`Reducer`); predict times (:class:`NetworkModel`).
"""

from dist_lib.comm.context import DistContext, choose_device, distributed
from dist_lib.comm.launcher import LaunchError, LaunchTimeout, RankError, launch

__all__ = [
    "DistContext",
    "LaunchError",
    "LaunchTimeout",
    "RankError",
    "choose_device",
    "distributed",
    "launch",
]
