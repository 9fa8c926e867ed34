"""Rank functions of the tests of encoded activations under data parallelism."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_lib.agoq import ActivationPlan, quantize_activations
from dist_lib.models import Decoder, DecoderConfig

SMALL = DecoderConfig(
    vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=80, max_seq_len=32,
    rope_theta=1e4, norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip


def _model():
    return quantize_activations(Decoder(SMALL), ActivationPlan("fp4", 32))


def _loss(model, rank):
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(rank))
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _expected():
    """The mean of both ranks' gradients, from a model of its own."""
    model = _model()
    for rank in range(dist.get_world_size()):
        (_loss(model, rank) / dist.get_world_size()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def under_ddp():
    """Largest distance of the gradients from the expected ones, relative to their largest value."""
    wrapped = DistributedDataParallel(_model())
    _loss(wrapped, dist.get_rank()).backward()
    expected = _expected()
    return max(
        float((p.grad - expected[n]).abs().max() / expected[n].abs().max())
        for n, p in wrapped.module.named_parameters()
    )


def under_fsdp():
    """The same for fully sharded layers; and the error of converting after sharding."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _loss(model, dist.get_rank()).backward()
    expected = _expected()
    distance = max(
        float((p.grad.full_tensor() - expected[n]).abs().max() / expected[n].abs().max())
        for n, p in model.named_parameters()
    )
    late = Decoder(SMALL)
    fully_shard(late.layers[0], mesh=mesh)
    try:
        quantize_activations(late, ActivationPlan())
    except ValueError as error:
        return distance, str(error)
    return distance, "accepted"
