"""Sparse weight sync: only the cells whose bits changed travel, and the receiver ends with the very same bits.

After *Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL*
(arXiv:2602.03839). Measure sparsity (:mod:`~dist_lib.pulse.sparsity_measures`); make, code and apply patches
(:func:`diff`, :func:`encode`, :func:`decode`, :func:`apply`); publish versions into a store and follow them
(:class:`Publisher`, :class:`Subscriber`, :class:`Store`); train with workers that exchange only visible updates
(:class:`PulseLoCo`). Coding needs ``pip install 'dist-lib[pulse]'``; importing this package does not.
"""

from dist_lib.pulse.codecs import CODECS
from dist_lib.pulse.errors import (
    CorruptPatchError,
    LimitError,
    MissingPackageError,
    PulseError,
    StaleBaseError,
    StateError,
)
from dist_lib.pulse.format import Limits, Patch
from dist_lib.pulse.loco import PulseLoCo
from dist_lib.pulse.loco_checkpoint import Resumed, resume, save_checkpoint
from dist_lib.pulse.loco_config import DesyncError, NonFiniteError, OuterConfig, RoundMetrics, WorkerLostError
from dist_lib.pulse.loco_loop import DataParallel, DenseDiLoCo
from dist_lib.pulse.manifest import SignatureError
from dist_lib.pulse.patch import apply, apply_in_place, changed_cells, decode, diff, encode
from dist_lib.pulse.publisher import Published, Publisher, Retention, clean
from dist_lib.pulse.sparsity_measures import SparsityRecorder, cast_state, count_changes, sparsity
from dist_lib.pulse.state import StateDigest, digest_state
from dist_lib.pulse.store import MissingObjectError, Retry, Store
from dist_lib.pulse.subscriber import Subscriber, Update

__all__ = [
    "CODECS",
    "CorruptPatchError",
    "DataParallel",
    "DenseDiLoCo",
    "DesyncError",
    "LimitError",
    "Limits",
    "MissingObjectError",
    "MissingPackageError",
    "NonFiniteError",
    "OuterConfig",
    "Patch",
    "Published",
    "Publisher",
    "PulseError",
    "PulseLoCo",
    "Resumed",
    "Retention",
    "Retry",
    "RoundMetrics",
    "SignatureError",
    "SparsityRecorder",
    "StaleBaseError",
    "StateDigest",
    "StateError",
    "Store",
    "Subscriber",
    "Update",
    "WorkerLostError",
    "apply",
    "apply_in_place",
    "cast_state",
    "changed_cells",
    "clean",
    "count_changes",
    "decode",
    "diff",
    "digest_state",
    "encode",
    "resume",
    "save_checkpoint",
    "sparsity",
]
