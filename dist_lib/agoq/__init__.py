"""AGoQ: activations stored in about 4 bits, gradients stored and summed through 8 bits.

Activations: :func:`quantize_activations` makes a model keep codes instead of tensors for its backward pass, as an
:class:`ActivationPlan` says; its parts are the functions :func:`norm_linear`, :func:`swiglu_linear` and
:func:`quant_linear` and modules around them. :class:`QuantizedSavedTensors` does it for any model, less well. Nothing
is computed in few bits: the forward pass keeps its bits.

Source: AGoQ (arXiv 2605.00539). The number formats are in :mod:`dist_lib.ops`.
"""

from dist_lib.agoq.convert import ActivationPlan, quantize_activations, restore_activations
from dist_lib.agoq.functions import Format, norm_linear, quant_linear, swiglu_linear
from dist_lib.agoq.hooks import QuantizedSavedTensors
from dist_lib.agoq.modules import NormLinear, QuantizedDecoderLayer, QuantLinear, SwiGLULinear

__all__ = [
    "ActivationPlan",
    "Format",
    "NormLinear",
    "QuantLinear",
    "QuantizedDecoderLayer",
    "QuantizedSavedTensors",
    "SwiGLULinear",
    "norm_linear",
    "quant_linear",
    "quantize_activations",
    "restore_activations",
    "swiglu_linear",
]
