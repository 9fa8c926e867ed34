"""Encoded activations under DDP and FSDP2: gradients are the mean of what each rank's own model gives."""

from dist_lib.comm import launch
from tests.distributed.ranks_of_agoq_layers import under_ddp, under_fsdp


def test_under_ddp():
    assert max(launch(under_ddp, world_size=2)) < 1e-5


def test_under_fully_shard_and_the_order_of_the_two():
    for distance, refusal in launch(under_fsdp, world_size=2):
        assert distance < 1e-5
        assert "before it is wrapped" in refusal
