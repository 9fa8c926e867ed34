"""What the ranks of test_launcher do; apart from the tests, so that no rank has to import pytest."""

import os
import signal
import time

import torch
import torch.distributed as dist

from dist_lib.comm import distributed


def rank_and_sum(offset):
    with distributed() as ctx:
        total = torch.tensor([float(ctx.rank + offset)])
        dist.all_reduce(total)
        return ctx.rank, ctx.world_size, total


def fail_on(rank):
    if dist.get_rank() == rank:
        print("about to fail")
        raise KeyError("the planted fault")
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def hang_on(rank):
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == rank:
        time.sleep(60)


def report_pid():
    return os.getpid()


def stay_away(rank):
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.all_reduce(torch.ones(4))


class Unmakeable:
    def __reduce__(self):
        return (int, ("not a number",))


def return_unmakeable():
    return Unmakeable()


def fail_while_others_sleep(how):
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("the planted fault")
    time.sleep(60)
