"""Wrong: each stage clips by its own norm, which turns the step."""

import math


def clip_stages(gradients, max_norm):
    total = 0.0
    for stage in gradients:
        square = sum(float(g.double().square().sum()) for g in stage)
        total += square
        norm = math.sqrt(square)
        if math.isfinite(norm) and norm > max_norm:
            for gradient in stage:
                gradient.mul_(max_norm / norm)
    return math.sqrt(total)
