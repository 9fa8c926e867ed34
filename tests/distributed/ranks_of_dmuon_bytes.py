"""Rank function of the test that holds counted bytes against the formulas."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dist_lib.comm import CommCounter, ExactReducer
from dist_lib.dmuon import make_plan
from dist_lib.dmuon.bytes import Sizes, step_payload
from dist_lib.dmuon.ddp import DMuonDDP
from dist_lib.dmuon.fsdp import DMuonFSDP
from dist_lib.dmuon.optimizer import DMuon
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import split_parameters

SHAPE = DecoderConfig(vocab_size=64, d_model=20, n_layers=3, n_heads=2, n_kv_heads=1, d_ff=28, max_seq_len=16)


def count_steps(modes):
    """For each mode: counted and predicted bytes of the second step, on this rank."""
    return {mode: _count(mode) for mode in modes}


def _count(mode):
    world = dist.get_world_size()
    model = Decoder(SHAPE, seed=0)
    plan = make_plan(split_parameters(model).muon, world)
    two = mode.startswith("hsdp")
    if mode == "ddp":
        runtime = DMuonDDP(model, plan, reducer=ExactReducer())
    else:
        shape = (2, world // 2) if two else (world,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        runtime = DMuonFSDP(model, plan, mesh=mesh, reshard_after_forward=mode.endswith("free"), reducer=ExactReducer())
    optimizer = DMuon(runtime)
    tokens = torch.arange(18).reshape(2, 9) + dist.get_rank()
    for _ in range(2):
        with CommCounter() as counter:
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
    predicted = step_payload(mode, plan, Sizes(shards=world // 2 if two else None))[dist.get_rank()]
    return {op: counter.bytes(op) for op in ("reduce", "broadcast")}, predicted
