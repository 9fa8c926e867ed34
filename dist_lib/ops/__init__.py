"""Operations on tensors: for each the readable reference, its registration with torch, and its kernels by device.

Newton-Schulz (:func:`newton_schulz`) with its coefficient sets (:data:`COEFFICIENTS`, :func:`polar_express`), FLOP
counts and the symmetric products that it is made of. Block quantisation (:func:`quantize`, :func:`accumulate_`) with
its number formats (:data:`CODECS`) and their measured error (:func:`error_table`); RMSNorm and SwiGLU around codes
(:func:`rms_norm_quantize`, :func:`rms_norm_backward`, :func:`swiglu_backward`). The cells of two tensors whose bits
differ (:func:`bit_changes`).
"""

from dist_lib.ops.bit_diff import bit_changes, bit_changes_use_kernel
from dist_lib.ops.codecs import CODECS, Codec, get_codec
from dist_lib.ops.coefficients import COEFFICIENTS, Triple, polar_express, resolve, scalar_map, with_safety
from dist_lib.ops.fused_quantized import (
    rms_norm_backward,
    rms_norm_quantize,
    swiglu_backward,
    swiglu_quantize,
    weight_gradient,
)
from dist_lib.ops.newton_schulz import (
    choose_form,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_sharded,
    normalise,
)
from dist_lib.ops.quantization import (
    Quantized,
    accumulate_,
    dequantize,
    quantize,
    quantize_uses_kernel,
    quantized_nbytes,
    quantized_zeros,
)
from dist_lib.ops.quantization_error import CodecError, error_table
from dist_lib.ops.symmetric import commuting_product, polynomial, symmetric_matmul, uses_kernel

__all__ = [
    "CODECS",
    "COEFFICIENTS",
    "Codec",
    "CodecError",
    "Quantized",
    "Triple",
    "accumulate_",
    "bit_changes",
    "bit_changes_use_kernel",
    "choose_form",
    "commuting_product",
    "dequantize",
    "error_table",
    "get_codec",
    "newton_schulz",
    "newton_schulz_flops",
    "newton_schulz_sharded",
    "normalise",
    "polar_express",
    "polynomial",
    "quantize",
    "quantize_uses_kernel",
    "quantized_nbytes",
    "quantized_zeros",
    "resolve",
    "rms_norm_backward",
    "rms_norm_quantize",
    "scalar_map",
    "swiglu_backward",
    "swiglu_quantize",
    "symmetric_matmul",
    "uses_kernel",
    "weight_gradient",
    "with_safety",
]
