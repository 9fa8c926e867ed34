"""What the ranks of test_async_faults do: disagree, bring uneven batches, change shapes, sleep too long, die."""

import os
import signal
import time

import torch
import torch.distributed as dist

from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.mesh import PipelineMesh
from dist_lib.async_pipeline.runtime import Pipeline
from dist_lib.comm import CommCounter
from dist_lib.comm.context import init_from_file
from tests.distributed.ranks_of_async import adamw, batches, build, loss_fn, modules


def attempt(action):
    """The error of this rank, in words, or "nothing"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusing(named):
    raise ValueError("this optimizer takes nothing")


def refused():
    """For each mistake, what this rank sees; every rank must see something, and the mesh must stay usable."""
    mesh, rank = PipelineMesh(), dist.get_rank()
    config = AsyncConfig(micro_batches=4)

    def make(**options):
        return Pipeline(
            modules(mesh.stages),
            **{"loss_fn": loss_fn, "make_optimizer": adamw, "config": config, "mesh": mesh, **options},
        )

    def other(**options):
        return AsyncConfig(**{"micro_batches": 4, **(options if rank == 1 else {})})

    data = batches(3, 8)
    found = {
        "m differs": attempt(lambda: make(config=other(micro_batches=8))),
        "clip differs": attempt(lambda: make(config=other(clip_norm=1.0))),
        "too few": attempt(lambda: make(config=AsyncConfig(micro_batches=1, allow_edge=True))),
        "edge": attempt(lambda: make(config=AsyncConfig(micro_batches=mesh.stages - 1))),
        "delay 2": attempt(lambda: make(config=AsyncConfig(micro_batches=4, delay=2))),
        "optimizer": attempt(lambda: make(make_optimizer=refusing if rank == 1 else adamw)),
        "momentum": attempt(
            lambda: make(
                config=AsyncConfig(micro_batches=4, error_feedback=True),
                make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            )
        ),
        "modules": attempt(
            lambda: Pipeline(modules(mesh.stages)[:2], loss_fn=loss_fn, make_optimizer=adamw, config=config, mesh=mesh)
        ),
        "timeout": attempt(lambda: make(config=AsyncConfig(micro_batches=4, timeout_s=1.0))),
        "mesh": attempt(lambda: PipelineMesh(2, replicas=2)),
        "mesh differs": attempt(lambda: PipelineMesh(replicas=1 + (rank == 1))),
        "length differs": attempt(lambda: make().run(data[: 3 - (rank == 1)])),
        "no pairs": attempt(lambda: make().run([data[0][0]])),
        "loss": attempt(lambda: make(loss_fn=lambda output, targets: output).run(data)),
        "tokens": attempt(lambda: make().run([(x + 1000, y) for x, y in data])),
    }
    pipeline = make()
    found["then"] = len(pipeline.run(data)), pipeline.run([])
    mesh.close()
    mesh.close()
    found["closed"] = attempt(lambda: pipeline.run(data))
    return found


def uneven():
    """Batches whose rows the micro-batches do not divide: in a list, and in the middle of a generator."""
    mesh = PipelineMesh()
    config = AsyncConfig(micro_batches=4)
    data = batches(4, 8)
    ragged = (*data[:3], (data[3][0][:7], data[3][1][:7]))
    other = (*data[:3], (data[3][0][:4], data[3][1][:4]))
    pipeline = build(mesh, config)
    pipeline.run(data[:1])
    with CommCounter() as counter:
        listed = attempt(lambda: pipeline.run(list(ragged)))
    results = {"list": listed, "sends": counter.count("send"), "step": pipeline.step}
    for name, source in (("ragged", ragged), ("other shape", other)):
        fresh = build(mesh, config)
        try:
            fresh.run(batch for batch in source)
        except ValueError as error:
            results[name] = (type(error).__name__, str(error), error.losses, fresh.step, len(fresh.run(data[3:])))
    results["expected"] = build(mesh, config).run(list(data[:3]))
    return results


def changed_shape():
    """A stage whose output changes its shape in the second batch."""
    mesh = PipelineMesh(timeout_s=5.0)
    stages = modules(mesh.stages)
    pipeline = Pipeline(
        stages, loss_fn=loss_fn, make_optimizer=adamw, mesh=mesh, config=AsyncConfig(micro_batches=4, timeout_s=5.0)
    )
    calls = []

    def cut(module, args, output):
        calls.append(1)
        return output[:, :-1] if len(calls) > 6 else output

    if mesh.stage == 0:
        pipeline.module.register_forward_hook(cut)
    pipeline.run(batches(4, 8))


def sleeping():
    """The last stage falls asleep; the others must give up by themselves, and say on what."""
    mesh = PipelineMesh(timeout_s=2.0)
    pipeline = build(mesh, AsyncConfig(micro_batches=4, timeout_s=2.0))

    def hook(batch, loss):
        if mesh.stage == mesh.stages - 1 and batch == 1:
            time.sleep(6)

    error = attempt(lambda: pipeline.run(batches(5, 8), on_batch=hook))
    again = [attempt(lambda: pipeline.run(batches(1, 8))), attempt(pipeline.state_dict)]
    if mesh.stage != mesh.stages - 1:
        time.sleep(6)  # a process that ends would tell the others at once
    return error, again


def dies(rank, directory, world_size, victim, how):
    """A process of its own: one stage dies in the middle of a run; the others write down what they saw."""
    torch.set_num_threads(1)
    init_from_file(os.path.join(directory, "rendezvous"), rank, world_size, device="cpu", timeout_s=60.0)
    mesh = PipelineMesh(timeout_s=10.0)
    pipeline = build(mesh, AsyncConfig(micro_batches=4, timeout_s=10.0))

    def hook(batch, loss):
        if rank == victim and batch == 2:
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)

    error = attempt(lambda: pipeline.run(batches(50, 8), on_batch=hook))
    with open(os.path.join(directory, f"rank-{rank}"), "w") as file:
        file.write(error)
    os._exit(0)
