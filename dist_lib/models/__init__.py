"""The decoder that every chapter trains, its shapes by name, and what it costs.

:class:`Decoder` and :data:`CONFIGS` define it; :func:`parameter_counts`, :func:`training_flops` and
:func:`training_bytes` predict what :class:`SavedTensorCounter` and torch's counters find; :func:`load_smollm2` brings a
real pretrained model in the same class.
"""

from dist_lib.models.config import CONFIGS, DecoderConfig, get_config
from dist_lib.models.counting import (
    FlopCounts,
    ParameterCounts,
    TrainingBytes,
    activation_bytes,
    parameter_counts,
    training_bytes,
    training_flops,
)
from dist_lib.models.decoder import MLP, Attention, Decoder, DecoderLayer, RMSNorm
from dist_lib.models.memory import SavedTensorCounter
from dist_lib.models.smollm2 import ModelMissing, copy_llama, load_smollm2, smollm2_available

__all__ = [
    "CONFIGS",
    "MLP",
    "Attention",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "FlopCounts",
    "ModelMissing",
    "ParameterCounts",
    "RMSNorm",
    "SavedTensorCounter",
    "TrainingBytes",
    "activation_bytes",
    "copy_llama",
    "get_config",
    "load_smollm2",
    "parameter_counts",
    "smollm2_available",
    "training_bytes",
    "training_flops",
]
