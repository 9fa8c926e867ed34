import torch
from torch import Tensor


def encode(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    blocks = -(-width // block)
    flat = x.new_zeros(tokens * blocks * block)
    flat[: x.numel()] = x.reshape(-1)
    pieces = flat.view(-1, block)
    scales = pieces.abs().amax(dim=1, keepdim=True)
    shares = pieces / torch.where(scales == 0, 1.0, scales)
    middles = (codebook[1:] + codebook[:-1]) / 2
    indices = torch.bucketize(shares, middles).to(torch.uint8).view(-1)[: x.numel()].view(tokens, width)
    even = indices.new_zeros(tokens, -(-width // 2) * 2)
    even[:, :width] = indices
    return even[:, 0::2] << 4 | even[:, 1::2], scales.view(tokens, blocks)


def decode(packed: Tensor, scales: Tensor, codebook: Tensor, block: int, width: int) -> Tensor:
    pairs = torch.stack((packed >> 4, packed & 15), dim=2)
    indices = pairs.flatten(1)[:, :width].long()
    by_number = scales.view(-1).repeat_interleave(block)[: indices.numel()].view(indices.shape)
    return codebook[indices] * by_number
