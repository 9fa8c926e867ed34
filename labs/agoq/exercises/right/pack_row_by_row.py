import torch
from torch import Tensor


def encode(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    packed, scales = [], []
    for row in x:
        indices: list[int] = []
        own = []
        for piece in row.split(block):
            scale = piece.abs().max()
            own.append(float(scale))
            shares = piece / scale if scale > 0 else torch.zeros_like(piece)
            indices += (shares[:, None] - codebook).abs().nan_to_num(9.0).argmin(dim=1).tolist()
        indices += [0] * (len(indices) % 2)
        packed.append([16 * a + b for a, b in zip(indices[::2], indices[1::2], strict=True)])
        scales.append(own)
    return torch.tensor(packed, dtype=torch.uint8), torch.tensor(scales)


def decode(packed: Tensor, scales: Tensor, codebook: Tensor, block: int, width: int) -> Tensor:
    rows = []
    for codes, own in zip(packed.tolist(), scales, strict=True):
        numbers = [codebook[half] for byte in codes for half in divmod(byte, 16)][:width]
        rows.append([float(n * own[i // block]) for i, n in enumerate(numbers)])
    return torch.tensor(rows)
