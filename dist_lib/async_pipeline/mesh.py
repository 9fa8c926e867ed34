"""Which rank is which stage of which replica, and the process groups that a pipeline speaks through.

Activations and gradients have groups of their own: on NCCL the messages between two ranks of one group are done in the
order in which each side asked for them, and the two directions of a pipeline ask in different orders. A mesh can serve
many pipelines, one after another.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_lib.comm import agree, collectives, distributed


class PipelineError(RuntimeError):
    """A stage could not go on: a neighbour failed, did not answer in time, or sent what was not agreed."""


_TEXT = 600  # bytes of a problem that the other ranks get to see


class PipelineMesh:
    """p stages times r replicas over all ranks; rank = stage * replicas + replica.

    The replicas of a stage are neighbours, so that gradients are averaged within a machine where possible. Make it on
    all ranks at once, inside a process group (:func:`~dist_lib.comm.launch`, ``torchrun``, or a world of one made by
    :func:`~dist_lib.comm.distributed`).

    Args:
        stages: p; default: all ranks.
        replicas: r.
        timeout_s: seconds after which waiting for another rank raises.

    Raises:
        AgreementError: on every rank, if the ranks ask for different meshes.
        ValueError: p times r is not the number of ranks.

    Attributes:
        stage, replica: this rank's place.
        device: where this rank computes.
    """

    def __init__(self, stages: int | None = None, *, replicas: int = 1, timeout_s: float = 60.0) -> None:
        size = dist.get_world_size()
        stages = size // max(replicas, 1) if stages is None else stages
        agree([stages, replicas, timeout_s], what="the mesh (stages, replicas, timeout)")
        if stages < 1 or replicas < 1 or stages * replicas != size:
            raise ValueError(
                f"{stages} stages times {replicas} replicas are {stages * replicas} ranks, but there are {size}: "
                "start as many ranks as the mesh has places"
            )
        self.stages, self.replicas, self.timeout_s = stages, replicas, timeout_s
        self.stage, self.replica = divmod(dist.get_rank(), replicas)
        with distributed() as context:
            self.device: torch.device = context.device
        timeout = timedelta(seconds=timeout_s)

        def group(ranks: list[int] | None = None) -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
            return made

        self._groups = {name: group() for name in ("world", "down", "up", "across")}
        pipelines = [group([s * replicas + k for s in range(stages)]) for k in range(replicas)]
        self._groups["pipeline"] = pipelines[self.replica]
        if replicas > 1:
            peers = [group([s * replicas + k for k in range(replicas)]) for s in range(stages)]
            self._groups["peers"] = peers[self.stage]
        # A group that is still referred to when Python ends may abort the process: this forgets them before.
        weakref.finalize(self, self._groups.clear)

    def group(self, name: str) -> dist.ProcessGroup:
        """A group by the name of its attribute.

        Raises:
            PipelineError: the mesh is closed, or has no such group.
        """
        if name not in self._groups:
            raise PipelineError(f"the mesh has no group {name!r}: it is closed, or was made without replicas")
        return self._groups[name]

    @property
    def world(self) -> dist.ProcessGroup:
        """Group of all ranks."""
        return self.group("world")

    @property
    def down(self) -> dist.ProcessGroup:
        """Group of all ranks, for messages to later stages."""
        return self.group("down")

    @property
    def up(self) -> dist.ProcessGroup:
        """Group of all ranks, for messages to earlier stages."""
        return self.group("up")

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """Group of the stages of this replica."""
        return self.group("pipeline")

    @property
    def peers(self) -> dist.ProcessGroup | None:
        """Group of the replicas of this stage; None with one replica."""
        return self.group("peers") if self.replicas > 1 else None

    def close(self) -> None:
        """Give up the groups, on all ranks; pipelines on this mesh cannot run any more. A second call does nothing."""
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def rank_of(self, stage: int) -> int:
        """Global rank of a stage of this replica."""
        return stage * self.replicas + self.replica

    @property
    def place(self) -> str:
        """This rank in words, for messages."""
        replica = f", replica {self.replica}" if self.replicas > 1 else ""
        return f"stage {self.stage}{replica} (rank {dist.get_rank()})"

    def settle(self, problem: Exception | None) -> None:
        """Raise on every rank if any rank has a problem; every rank must call this.

        Args:
            problem: what went wrong on this rank, if anything; raised again here as it is.

        Raises:
            PipelineError: another rank has a problem; the message says which and what.
        """
        text = "" if problem is None else f"{self.place}: {type(problem).__name__}: {problem}"
        raw = text.encode()[:_TEXT]
        row = torch.zeros(_TEXT, dtype=torch.uint8, device=self.device)
        row[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8, device=self.device)
        rows = collectives.all_gather(row, group=self.world).cpu()
        if problem is not None:
            raise problem
        texts = [bytes(r.tolist()).rstrip(b"\0").decode(errors="replace") for r in rows]
        if any(texts):
            raise PipelineError("; ".join(t for t in texts if t))
