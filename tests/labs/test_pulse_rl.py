"""Trainer and sampler in two processes: the same bits as in one, also after either of them was killed."""

import dataclasses
import json
import time

import pytest

from dist_lib.pulse import CorruptPatchError, Store
from dist_lib.pulse.store import ObjectExistsError
from dist_lib.pulse.subscriber import newest_version
from dist_lib.tasks import GrpoConfig, sample_rollouts
from labs.pulse.trainer_sampler import (
    Pair,
    PairSettings,
    RunError,
    WorkerDied,
    history_of,
    receive_rollouts,
    run_alone,
    run_pair,
    run_trainer,
    send_rollouts,
)

GRPO = GrpoConfig(lr=1e-4, warmup_steps=1, prompts=4, samples=4)
SETTINGS = PairSettings(grpo=GRPO, steps=5, anchor_every=3, wait_s=100.0)
LONG = dataclasses.replace(SETTINGS, steps=16)


@pytest.fixture(scope="module")
def alone():
    return run_alone(LONG)


def rollouts(step, version):
    return sample_rollouts(SETTINGS.new_model(), SETTINGS.task, GRPO, step=step, version=version)


@pytest.mark.parametrize("sync", ["patch", "full"])
def test_a_run_with_patches_is_one_with_full_copies(alone, tmp_path, sync):
    settings = dataclasses.replace(SETTINGS, sync=sync)
    found = run_pair(settings, tmp_path)
    assert found == alone[:5]  # every loss, reward, norm and digest, step for step
    assert len({step["digest"] for step in found}) == 5 and any(step["loss"] != 0 for step in found)
    kinds = {n.rpartition(".")[2] for n in Store(str(tmp_path / "weights")).names("versions")}
    assert kinds == ({"patch", "anchor"} if sync == "patch" else {"anchor"})


def test_a_stale_run_is_bounded_and_repeatable(alone, tmp_path):
    settings = dataclasses.replace(SETTINGS, staleness=2)
    found = run_pair(settings, tmp_path)
    assert found == run_alone(settings) and found != alone[:5]
    assert [step["step"] - step["version"] for step in found] == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_a_killed_process_is_named_and_the_run_goes_on(alone, tmp_path, role):
    with Pair(LONG, tmp_path) as pair:
        end = time.monotonic() + 100
        while len(history_of(tmp_path)) < 2 and time.monotonic() < end:
            time.sleep(0.005)
        pair.kill(role)
        with pytest.raises(WorkerDied, match=f"the {role} was killed by signal 9(.|\n)*start the run again"):
            pair.wait()
    assert not any(p.is_alive() for p in pair.processes.values())
    before = history_of(tmp_path)
    assert 2 <= len(before) < 16 and before == alone[: len(before)]
    assert run_pair(LONG, tmp_path) == alone


def test_a_trainer_that_fell_between_saving_and_publishing_publishes(alone, tmp_path):
    assert run_pair(dataclasses.replace(SETTINGS, steps=2), tmp_path) == alone[:2]
    store = Store(str(tmp_path / "weights"))
    store.delete("versions/" + next(n for n in store.names("versions") if "2" in n).rpartition("/")[2])
    store.delete("head")
    assert newest_version(store, listed=True) == 1
    run_trainer(dataclasses.replace(SETTINGS, steps=2), tmp_path)
    assert newest_version(store, listed=True) == 2 and history_of(tmp_path) == alone[:2]
    with pytest.raises(RunError, match="other settings"), Pair(dataclasses.replace(SETTINGS, steps=3), tmp_path):
        pass
    (tmp_path / "trainer.pt").unlink()
    with pytest.raises(RunError, match="the trainer's state is gone"):
        run_trainer(dataclasses.replace(SETTINGS, steps=2), tmp_path)


def test_a_process_that_waits_in_vain_says_so(tmp_path):
    with pytest.raises(RunError, match="no rollouts for step 0 after 0 s"):
        run_trainer(dataclasses.replace(SETTINGS, wait_s=0.0, warm_steps=0), tmp_path)


def test_rollouts_that_are_too_old_are_refused(tmp_path):
    settings = dataclasses.replace(SETTINGS, warm_steps=0, steps=3)
    inbox = Store(str(tmp_path / "rollouts"))
    for step in range(3):
        send_rollouts(inbox, rollouts(step, 0))
    with pytest.raises(RunError, match="rollouts of version 0 for step 2; granted are 1"):
        run_trainer(dataclasses.replace(settings, staleness=1), tmp_path)
    assert len(history_of(tmp_path)) == 2


def test_damaged_and_doubled_rollouts_are_refused(tmp_path):
    store = Store(str(tmp_path))
    assert receive_rollouts(store, 0) is None
    batch = rollouts(0, 0)
    send_rollouts(store, batch)
    send_rollouts(store, batch)  # a sampler that was killed and does it again
    found = receive_rollouts(store, 0)
    assert found is not None and found.rewards.equal(batch.rewards) and found.log_probs.equal(batch.log_probs)
    with pytest.raises(ObjectExistsError):
        send_rollouts(store, dataclasses.replace(rollouts(1, 0), step=0))
    store.put("ready/00000005", store.get("ready/00000000", 4096))
    with pytest.raises(CorruptPatchError, match="those of step 0"):
        receive_rollouts(store, 5)
    for step, marker in ((6, b"{"), (7, b'{"object": "../../x", "size": 9}'), (8, b"[]")):
        store.put(f"ready/{step:08d}", marker)
        with pytest.raises(CorruptPatchError):
            receive_rollouts(store, step)
    content = json.loads(store.get("ready/00000000", 4096))
    name = f"objects/{content['object'][:2]}/{content['object']}"
    data = bytearray(store.get(name, content["size"]))
    data[len(data) // 2] ^= 4
    store.put(name, bytes(data))
    with pytest.raises(CorruptPatchError):
        receive_rollouts(store, 0)


def test_settings_survive_json():
    assert PairSettings.read(SETTINGS.write()) == SETTINGS
    for wrong in ({"steps": 0}, {"staleness": -1}, {"sync": "delta"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dataclasses.replace(SETTINGS, **wrong)
