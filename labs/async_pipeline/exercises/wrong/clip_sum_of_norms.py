"""Wrong: adds the norms of the stages instead of their squares."""

import math


def clip_stages(gradients, max_norm):
    norm = sum(math.sqrt(sum(float(g.double().square().sum()) for g in stage)) for stage in gradients)
    if math.isfinite(norm) and norm > max_norm:
        for stage in gradients:
            for gradient in stage:
                gradient.mul_(max_norm / norm)
    return norm
