"""What ``python -m labs gpu-check`` runs: one module for each group of kernels."""
