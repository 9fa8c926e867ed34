"""Checkpoints of owner-sharded Muon: bits after a restart, other ranks and owners, a process killed while saving."""

import pytest

from dist_lib.comm import RankError, launch
from dist_lib.dmuon.checkpoint import latest_checkpoint
from tests.distributed.ranks_of_dmuon_checkpoint import killed_while_saving, load_all, odds_and_ends, save_all


def test_next_steps_as_if_uninterrupted(tmp_path):
    """On the same ranks and on others, with other owners: weights, masters and momentum, bit for bit."""
    outcomes = launch(save_all, world_size=2, args=(str(tmp_path), ["ddp", "fsdp"]), timeout_s=100)
    saved = outcomes[0][0]
    loaded = [found for _, found in outcomes]
    loaded += launch(load_all, world_size=4, args=(str(tmp_path), ["ddp", "fsdp"], 9), timeout_s=100)
    loaded += launch(load_all, world_size=1, args=(str(tmp_path), ["ddp", "fsdp"], 10), timeout_s=100)
    assert len(loaded) == 7
    for index, found in enumerate(loaded):
        for mode, (state, told) in found.items():
            assert state == saved[mode], f"{mode}, {index}"
            assert told == (2, {"epoch": 5}, 0.013, 1.0)


def test_killed_while_saving_leaves_the_last_good_one(tmp_path):
    with pytest.raises(RankError, match="rank 1"):
        launch(killed_while_saving, world_size=2, args=(str(tmp_path),))
    assert latest_checkpoint(tmp_path).name == "step-0000000001"
    assert (tmp_path / ".saving-step-0000000002").exists()


def test_kept_refused_exchanged(tmp_path):
    for found in launch(odds_and_ends, world_size=2, args=(str(tmp_path),), timeout_s=100):
        assert found["kept"] == ["step-0000000002", "step-0000000003"]
        assert found["exchange"] and found["changed"]
        expected = {
            "nothing": "no complete checkpoint",
            "exists": "exists already",
            "extra": "not JSON serializable",
            "between": "save between steps",
            "other model": "is of another model",
            "other mode": "model_state_dict",
            "missing": "missing or have another shape",
        }
        assert {k: found.get(k) for k in expected if expected[k] not in found.get(k, "")} == {}
