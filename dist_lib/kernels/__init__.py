"""Triton kernels and their launchers, nothing else. Imported only where Triton is installed.

Each takes tensors that the operation in :mod:`dist_lib.ops` has checked; the reference there is the definition.
"""
