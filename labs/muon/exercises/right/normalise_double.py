"""Right, written differently: float64 has room for the squares."""


def normalise(x):
    x = x.double()
    norm = x.square().sum().sqrt()
    return (x / norm if norm > 0 else x).float()
