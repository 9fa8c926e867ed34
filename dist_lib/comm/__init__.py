"""Processes and what they say to each other.

Start processes (:func:`launch`) or find out where this one stands (:func:`distributed`); speak through
:mod:`~dist_lib.comm.collectives`; count every byte (:class:`CommCounter`); agree on a plan before acting on it
(:func:`agree`); reduce gradients through a seam that other packages can replace (:class:`Reducer`); predict times
(:class:`NetworkModel`).
"""

from dist_lib.comm import collectives
from dist_lib.comm.agreement import AgreementError, agree, fingerprint
from dist_lib.comm.context import DistContext, choose_device, distributed
from dist_lib.comm.counter import CommCounter, CommRecord
from dist_lib.comm.launcher import LaunchError, LaunchTimeout, RankError, launch
from dist_lib.comm.network import NetworkModel
from dist_lib.comm.reducer import ExactReducer, Reducer

__all__ = [
    "AgreementError",
    "CommCounter",
    "CommRecord",
    "DistContext",
    "ExactReducer",
    "LaunchError",
    "LaunchTimeout",
    "NetworkModel",
    "RankError",
    "Reducer",
    "agree",
    "choose_device",
    "collectives",
    "distributed",
    "fingerprint",
    "launch",
]
