"""Wrong: one NaN makes every gradient NaN."""

import math


def clip_stages(gradients, max_norm):
    norm = math.sqrt(sum(float(g.double().square().sum()) for stage in gradients for g in stage))
    if not norm <= max_norm:
        for stage in gradients:
            for gradient in stage:
                gradient.mul_(max_norm / norm)
    return norm
