"""The 8-bit reducer on four ranks: behind the seam, under DDP and FSDP2, and for main gradients held in 8 bits."""

from functools import lru_cache

from dist_lib.comm import launch
from tests.distributed.ranks_of_agoq_reducer import everything


@lru_cache(maxsize=1)
def run():
    """The ranks are started once for all tests here."""
    return launch(everything, world_size=4, timeout_s=120)


def column(part, key):
    """One result of every rank."""
    return [rank[part][key] for rank in run()]


def test_the_three_calls_threshold_keys_nodes_and_agreement():
    for rank in run():
        assert all(rank["seam"].values()), rank["seam"]


def test_a_checkpoint_holds_what_was_lost_and_the_random_numbers():
    for rank in run():
        assert all(rank["kept"].values()), rank["kept"]


def test_ddp_gradients_have_the_same_bits_everywhere_and_counted_bytes():
    for cap in (25, 0.004):
        assert len(set(column("ddp", ("digest", cap)))) == 1
        assert max(column("ddp", ("large", cap))) < 0.015
        assert max(column("ddp", ("small", cap))) < 1e-5
    assert all(column("ddp", "bytes"))


def test_error_feedback_goes_by_parameter_whatever_the_buckets():
    assert all(column("ddp", "keys"))
    assert max(column("ddp", "nothing lost")) < 1e-5
    assert max(column("ddp", ("sum", True))) < 0.6 * min(column("ddp", ("sum", False)))


def test_fsdp_gradients():
    for rank in run():
        found = dict(rank["fsdp"])
        assert found.pop("error") < 0.03
        assert all(found.values()), found


def test_main_gradients_over_ranks():
    for limit in (2**25, 1000):
        for key in ("digest", "clipped"):
            assert len(set(column("main", (key, limit)))) == 1
        assert all(clipped for _, clipped in column("main", ("clipped", limit)))
        assert max(column("main", ("error", limit))) < 0.02
        assert max(column("main", ("shards", limit))) < 0.015
        assert max(column("main", ("norm", limit))) < 1e-9
        assert max(column("main", ("shard norm", limit))) < 1e-3
        assert all(column("main", ("shards clipped", limit)))
        assert all(column("main", ("bytes", limit)))
    assert set(column("main", ("buckets", 1000))) == {3}  # one matrix each


def test_owner_sharded_muon_takes_the_reducer_as_it_is():
    found = [rank["muon"] for rank in run()]
    assert len({digest for digest, _ in found}) == 1
    assert 0 < max(distance for _, distance in found) < 0.3  # both update rules enlarge the small numbers of a gradient
