"""Operations on tensors: for each the readable reference, its registration with torch, and its kernels by device.

Newton-Schulz (:func:`newton_schulz`) with its coefficient sets (:data:`COEFFICIENTS`, :func:`polar_express`), FLOP
counts and the symmetric products that it is made of.
"""

from dist_lib.ops.coefficients import COEFFICIENTS, Triple, polar_express, resolve, scalar_map, with_safety
from dist_lib.ops.newton_schulz import choose_form, newton_schulz, newton_schulz_flops, normalise
from dist_lib.ops.symmetric import commuting_product, polynomial, symmetric_matmul, uses_kernel

__all__ = [
    "COEFFICIENTS",
    "Triple",
    "choose_form",
    "commuting_product",
    "newton_schulz",
    "newton_schulz_flops",
    "normalise",
    "polar_express",
    "polynomial",
    "resolve",
    "scalar_map",
    "symmetric_matmul",
    "uses_kernel",
    "with_safety",
]
