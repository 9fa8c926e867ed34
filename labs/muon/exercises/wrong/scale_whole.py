"""Wrong: orthogonalises the fused matrix as one."""


def fused_update(momentum, sizes, orthogonalise, target_rms):
    return orthogonalise(momentum) * target_rms * max(momentum.shape) ** 0.5
