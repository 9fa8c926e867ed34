"""Where this process stands: rank, world size, device and process group, by one call.

:func:`distributed` works in a plain ``python script.py`` (a world of one), under ``torchrun``, inside
:func:`dist_lib.comm.launch`, from a notebook and from pytest. Library code takes the :class:`DistContext` that it
yields and never asks the environment itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class DistContext:
    """One process's place in the world.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: number of processes.
        local_rank: index of this process on its machine.
        device: where this process computes.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks.

        It is looked up and not held. A group that is still referenced when Python ends outlives
        ``destroy_process_group``, and its threads abort the process.

        Raises:
            RuntimeError: after the group has been destroyed.
        """
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("the process group of this context has been destroyed; use it inside its with block")
        return group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0


def choose_device(device: str = "auto", local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """Turn ``"auto"``, ``"cpu"`` or ``"cuda"`` into a device, with one GPU for each local rank.

    ``"auto"`` takes GPUs only if there is one for *every* local rank, so that all ranks choose alike.

    Raises:
        ValueError: an unknown name, CUDA asked for where there is none, or fewer GPUs than local ranks.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r}: allowed are 'auto', 'cpu' and 'cuda'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and count < max(local_world_size, local_rank + 1)):
        return torch.device("cpu")
    if count == 0:
        raise ValueError("device 'cuda' was asked for, but this machine shows no CUDA device; use --device cpu")
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: this machine shows {count}; start fewer ranks"
        )
    return torch.device("cuda", local_rank)


def _context(device: torch.device, local_rank: int) -> DistContext:
    return DistContext(dist.get_rank(), dist.get_world_size(), local_rank, device, dist.get_backend())


@contextlib.contextmanager
def distributed(*, device: str = "auto", timeout_s: float = 30.0) -> Iterator[DistContext]:
    """Yield this process's :class:`DistContext`; make the process group if there is none yet, and only then destroy it.

    Args:
        device: ``"auto"`` takes a GPU if there is one for this local rank, else the CPU.
        timeout_s: how long a collective may wait for the other ranks before it raises.

    Raises:
        ValueError: see :func:`choose_device`; or an incomplete ``torchrun`` environment.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.is_initialized():
        if dist.get_backend() == "gloo":  # the group decides: CUDA tensors on gloo would be copied back and forth
            device = "cpu"
        else:
            device, local_rank = "cuda", torch.cuda.current_device()
        yield _context(choose_device(device, local_rank), local_rank)
        return
    chosen = choose_device(device, local_rank, local_world_size)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"RANK is set but {', '.join(missing)} is not: start with torchrun, or unset RANK")
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield _context(chosen, local_rank)
    finally:
        dist.destroy_process_group()


def init_from_file(path: str, rank: int, world_size: int, *, device: str, timeout_s: float) -> None:
    """Make the default group through a file that all ranks can see: no port to be busy.

    Args:
        path: a file that does not exist yet, in a directory of this launch alone.
        rank: this process's rank.
        world_size: number of processes.
        device: as for :func:`choose_device`.
        timeout_s: timeout of the group, in seconds.
    """
    chosen = choose_device(device, rank, world_size)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
