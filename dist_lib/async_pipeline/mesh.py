"""Which rank is which stage of which replica, and the process groups that a pipeline speaks through.

Activations and gradients have groups of their own: on NCCL the messages between two ranks of one group are done in the
order in which each side asked for them, and the two directions of a pipeline ask in different orders. A mesh can serve
many pipelines, one after another.
"""

from __future__ import annotations

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
        world: group of all ranks.
        down, up, across: groups of all ranks for messages to later stages, to earlier ones, and between tied weights.
        pipeline: group of the stages of this replica.
        peers: group of the replicas of this stage; None with one replica.
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

        self.world, self.down, self.up, self.across = group(), group(), group(), group()
        pipelines = [group([s * replicas + k for s in range(stages)]) for k in range(replicas)]
        self.pipeline = pipelines[self.replica]
        self.peers: dist.ProcessGroup | None = None
        if replicas > 1:
            peers = [group([s * replicas + k for k in range(replicas)]) for s in range(stages)]
            self.peers = peers[self.stage]

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
