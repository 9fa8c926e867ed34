"""Wrong: also stretches a gradient that is shorter than the limit, and divides by zero."""

import math


def clip_stages(gradients, max_norm):
    norm = math.sqrt(sum(float(g.double().square().sum()) for stage in gradients for g in stage))
    for stage in gradients:
        for gradient in stage:
            gradient.mul_(max_norm / (norm + 1e-12))
    return norm
