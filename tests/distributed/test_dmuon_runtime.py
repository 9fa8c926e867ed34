"""Owner-sharded Muon over replicated weights, on 1 to 4 gloo ranks."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_lib.comm import RankError, launch
from dist_lib.dmuon.events import exposed_seconds
from tests.distributed.ranks_of_dmuon import against_reference, every_feature
from tests.distributed.ranks_of_dmuon_faults import disagreements, long_run, one_dies, refusals, shapes, timeline


@pytest.mark.parametrize(
    ("world_size", "publish", "plans"),
    [
        (1, "sync", ["lpt"]),
        (2, "async", ["lpt", "rank0", 11]),
        (3, "sync", ["lpt", 12]),
        (4, "sync", ["lpt", "round_robin", 13, 14]),
        (4, "async", ["rank0", 15, 16]),
    ],
)
def test_bits_of_one_process_for_every_owner_map(world_size, publish, plans):
    assert launch(against_reference, world_size=world_size, args=(publish, plans), timeout_s=110) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_feature(world_size):
    for rank, outcomes in enumerate(launch(every_feature, world_size=world_size, timeout_s=110)):
        assert [name for name, good in outcomes.items() if not good] == [], f"rank {rank}"


def test_five_hundred_steps_bit_equal():
    for unequal, progress, counts in launch(long_run, world_size=2, args=(500,), timeout_s=110):
        assert unequal == 0
        assert progress > 1.5  # the loss has fallen
        assert counts == {500}


def test_disagreement_raises_on_every_rank():
    for rank, found in enumerate(launch(disagreements, world_size=3)):
        assert set(found) == {"owners", "config", "model", "unsupported", "options"}, f"rank {rank}"
        assert {k for k, v in found.items() if v != "AgreementError"} <= ({"unsupported"} if rank == 1 else set())


def test_a_rank_that_dies_ends_the_others():
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        launch(one_dies, world_size=3, args=(2,))
    assert time.monotonic() - begin < 20  # long before the group's timeout


def test_refusals_say_what_to_do():
    expected = {
        "ddp": "hand over the plain module",
        "compiled": "compiled with torch.compile",
        "sparse": "sparse=False",
        "meta": "give the weights values",
        "frozen": "nothing to train",
        "world": "the plan is for 3 ranks, this group has 2",
        "other model": "the plan is not of this model",
        "split": "not that parameter of this model",
        "layer_of": "no module that contains it",
        "publish": "'sync' or 'async'",
        "dtype": "allowed are float32",
        "pattern": "not a regular expression",
        "option": "rho",
        "negative": "lr = -1.0",
        "twice": "a group has already",
        "unknown": "not a trained parameter",
        "state_dict": "save_checkpoint",
        "load_state_dict": "load_checkpoint",
        "add": "groups=",
        "norm": "must be above 0",
        "clear": "on their way",
        "again": "zero_grad() first",
    }
    for found in launch(refusals, world_size=2, timeout_s=110):
        assert {k: found.get(k) for k in expected if expected[k] not in found.get(k, "")} == {}


def test_timeline_of_events():
    for layers, sizes, events in launch(timeline, world_size=2):
        assert {e.rank for e in events} == {0, 1}
        assert {e.kind for e in events} >= {
            "forward",
            "backward",
            "reduce",
            "orthogonalise",
            "adamw",
            "publish",
            "wait",
        }
        assert all(e.end >= e.start for e in events)
        for rank in (0, 1):
            mine = [e for e in events if e.rank == rank]
            for layer in layers:
                assert sum(e.bytes for e in mine if e.kind == "publish" and e.layer == layer) == 2 * sizes[layer]
            reduced = [e.layer for e in mine if e.kind == "reduce" and e.layer != "rest"]
            assert list(dict.fromkeys(reduced)) == layers[::-1]
        assert set(exposed_seconds(events)) <= set(layers)


SIZES = st.tuples(st.sampled_from([1, 2, 3, 7, 13, 16]), st.sampled_from([1, 2, 5, 11, 16]))


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=6, max_size=6))
def test_any_shapes(cases):
    assert launch(shapes, world_size=3, args=([[(1, 7), (7, 1), (1, 1)], *cases],), timeout_s=110) == [[]] * 3
