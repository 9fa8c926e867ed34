"""Mistakes and deaths: every rank hears of them, none waits for ever."""

import multiprocessing
import time

import pytest

from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.comm import RankError, launch
from tests.distributed import ranks_of_async_faults as ranks

SEEN = {  # by mistake: what rank 1 sees, what the others see
    "m differs": ("AgreementError: ranks [1] of 3",) * 2,
    "clip differs": ("AgreementError: ranks [1] of 3",) * 2,
    "too few": ("ValueError: micro_batches = 1 with 3 stages asks for weights that do not exist",) * 2,
    "edge": ("ValueError: micro_batches = 2 with 3 stages leaves no time for the update",) * 2,
    "delay 2": ("ValueError: the runtime runs a delay of 0 or 1 for all stages, not 2: use the emulator",) * 2,
    "optimizer": ("ValueError: this optimizer", "PipelineError: stage 1 (rank 1): ValueError: this optimizer"),
    "momentum": ("ValueError: SGD, group 0, has momentum 0",) * 2,
    "modules": ("ValueError: 2 modules for 3 stages",) * 2,
    "timeout": ("ValueError: the mesh has a timeout of 60 s, the configuration 1 s",) * 2,
    "mesh": ("ValueError: 2 stages times 2 replicas are 4 ranks, but there are 3",) * 2,
    "mesh differs": ("AgreementError: ranks [1] of 3",) * 2,
    "length differs": ("AgreementError: ranks [1] of 3",) * 2,
    "no pairs": ("BatchError: batch 0 is not a pair of tensors",) * 2,
    "loss": ("PipelineError: stage 2 (rank 2): ValueError: loss_fn must return a scalar",) * 2,
    "closed": ("PipelineError: the mesh has no group 'world': it is closed",) * 2,
    "tokens": ("PipelineError: stage 0 (rank 0): IndexError: index out of range",) * 2,
}


def test_mistakes_are_refused_on_every_rank():
    for rank, found in enumerate(launch(ranks.refused, world_size=3, timeout_s=90)):
        assert found.pop("then") == (3, [])
        assert found.keys() == SEEN.keys()
        for mistake, text in found.items():
            cause = {"loss": 2, "tokens": 0}.get(mistake)
            expected = SEEN[mistake][rank != 1]
            assert text.startswith(expected.split("): ")[1] if rank == cause else expected), (rank, mistake, text)


def test_uneven_batches_are_refused_before_anything_is_sent():
    for found in launch(ranks.uneven, world_size=3):
        assert found["list"].startswith("BatchError: batch 3 has inputs (7, 6)") and "multiple of 4" in found["list"]
        assert found["sends"] == 0 and found["step"] == 1
        for name in ("ragged", "other shape"):
            kind, _, losses, step, after = found[name]
            assert (kind, losses, step, after) == ("BatchError", found["expected"], 3, 1)


def test_a_message_of_another_shape_is_not_sent():
    with pytest.raises(RankError, match=r"rank 0 of 2 raised[\s\S]*the shape of a message must not change"):
        launch(ranks.changed_shape, world_size=2)


def test_a_stage_that_sleeps_is_given_up_in_time():
    found = launch(ranks.sleeping, world_size=3)
    for rank, (error, again) in enumerate(found[:-1]):
        assert error.startswith(f"PipelineError: stage {rank} (rank {rank}) gave up on "), error
        assert "batch" in error and "timeout 2 s" in error
        assert all("stopped in the middle of a run" in text for text in again)


@pytest.mark.parametrize(("victim", "how"), [(0, "exit"), (1, "kill"), (3, "kill")])
def test_a_dead_stage_gives_every_other_an_error_within_the_timeout(tmp_path, victim, how):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "dist_lib.comm.launcher"])
    processes = [context.Process(target=ranks.dies, args=(r, str(tmp_path), 4, victim, how)) for r in range(4)]
    begin = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)  # the timeout is 10 s
    ended = time.monotonic() - begin
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive, f"still running after {ended:.0f} s"
    assert processes[victim].exitcode == (3 if how == "exit" else -9)
    assert not (tmp_path / f"rank-{victim}").exists()
    for rank in set(range(4)) - {victim}:
        error = (tmp_path / f"rank-{rank}").read_text()
        assert error.startswith(f"PipelineError: stage {rank} (rank {rank}) gave up on "), error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batches": 0}, "micro_batches is 0; it must be at least 1"),
        ({"micro_batches": 1, "delay": -1}, "delay is -1"),
        ({"micro_batches": 1, "delay": ()}, "delay is"),
        ({"micro_batches": 1, "clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"micro_batches": 1, "clip_norm": float("nan")}, "clip_norm is nan"),
        ({"micro_batches": 1, "ef_strength": -1.0}, "ef_strength is -1"),
        ({"micro_batches": 1, "timeout_s": 0.0}, "timeout_s is 0"),
    ],
)
def test_configurations_that_make_no_sense(options, text):
    with pytest.raises(ValueError, match=text):
        AsyncConfig(**options)
