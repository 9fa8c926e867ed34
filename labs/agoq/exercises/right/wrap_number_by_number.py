import math

import torch
from torch import Tensor


def wrapped(codes: Tensor) -> Tensor:
    eight = codes[0].clone()
    for term in codes[1:]:
        eight += term
    return torch.tensor([int(e) != sum(column) for e, column in zip(eight, codes.T.tolist(), strict=True)])


def accumulate(codes: Tensor, scales: Tensor, gradient: Tensor, block: int) -> tuple[Tensor, Tensor]:
    new_codes: list[int] = []
    new_scales = []
    for i, scale in enumerate(scales.tolist()):
        piece = slice(i * block, (i + 1) * block)
        pairs = zip(codes[piece].tolist(), gradient[piece].tolist(), strict=True)
        total = [c * scale / 127 + g for c, g in pairs]
        largest = math.nan if any(map(math.isnan, total)) else max(map(abs, total))
        new_scales.append(largest)
        new_codes += [round(127 * t / largest) if largest > 0 else 0 for t in total]
    return torch.tensor(new_codes, dtype=torch.int8), torch.tensor(new_scales)
