"""Wrong: overwrites the gradients it was given, and lets an empty rank's NaN through."""


def combine(gradients, rows):
    total = gradients[0].mul_(rows[0])
    for gradient, n in zip(gradients[1:], rows[1:], strict=True):
        total += gradient * n
    return total / sum(rows)
