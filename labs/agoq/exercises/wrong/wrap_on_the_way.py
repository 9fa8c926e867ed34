import torch
from torch import Tensor


def wrapped(codes: Tensor) -> Tensor:
    sums = codes.to(torch.int32).cumsum(dim=0)
    return ((sums < -128) | (sums > 127)).any(dim=0)


def accumulate(codes: Tensor, scales: Tensor, gradient: Tensor, block: int) -> tuple[Tensor, Tensor]:
    stored = codes.view(-1, block).float() * (scales[:, None] / 127)
    total = stored + gradient.view(-1, block)
    largest = total.abs().amax(dim=1)
    divisor = torch.where(largest == 0, 1.0, largest)[:, None]
    anew = (total / divisor * 127).round().nan_to_num(0.0).to(torch.int8)
    return anew.view(-1), largest
