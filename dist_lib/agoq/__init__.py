"""AGoQ: activations stored in about 4 bits, gradients stored and summed through 8 bits.

Activations: :func:`quantize_activations` makes a model keep codes instead of tensors for its backward pass, as an
:class:`ActivationPlan` says; its parts are the functions :func:`norm_linear`, :func:`swiglu_linear` and
:func:`quant_linear` and modules around them. :class:`QuantizedSavedTensors` does it for any model, less well. Nothing
is computed in few bits: the forward pass keeps its bits.

Gradients: :class:`QuantizedReducer` reduces them over ranks through 8-bit messages that are added in float32, behind
any runtime's reducer seam; :func:`quantize_ddp_gradients` and :func:`quantize_fsdp_gradients` put it under torch's own
data parallelism. :class:`QuantizedGradients` holds the sum of a step's micro-batches in 8 bits and sends what it holds.
The calls themselves, with the look of ``torch.distributed``, are in :mod:`dist_lib.agoq.collectives`.

Optimizer: :func:`adamw_8bit` holds AdamW's moments in 8 bits, through bitsandbytes; :func:`ablation` counts what each
of the three saves on a small model.

Source: AGoQ (arXiv 2605.00539). The number formats are in :mod:`dist_lib.ops`.
"""

from dist_lib.agoq.convert import ActivationPlan, quantize_activations, restore_activations
from dist_lib.agoq.data_parallel import quantize_ddp_gradients, quantize_fsdp_gradients
from dist_lib.agoq.functions import Format, norm_linear, quant_linear, swiglu_linear
from dist_lib.agoq.gradients import GradientShards, QuantizedGradients
from dist_lib.agoq.hooks import QuantizedSavedTensors
from dist_lib.agoq.modules import NormLinear, QuantizedDecoderLayer, QuantLinear, SwiGLULinear
from dist_lib.agoq.optimizer_state import Ablation, ablation, adamw_8bit, moment_bytes, state_bytes
from dist_lib.agoq.reducer import QuantizedReducer
from dist_lib.agoq.wire import GradientFormat, WireBytes, wire_bytes

__all__ = [
    "Ablation",
    "ActivationPlan",
    "Format",
    "GradientFormat",
    "GradientShards",
    "NormLinear",
    "QuantLinear",
    "QuantizedDecoderLayer",
    "QuantizedGradients",
    "QuantizedReducer",
    "QuantizedSavedTensors",
    "SwiGLULinear",
    "WireBytes",
    "ablation",
    "adamw_8bit",
    "moment_bytes",
    "norm_linear",
    "quant_linear",
    "quantize_activations",
    "quantize_ddp_gradients",
    "quantize_fsdp_gradients",
    "restore_activations",
    "state_bytes",
    "swiglu_linear",
    "wire_bytes",
]
