"""Publishing what no rank holds whole: FSDP2's rows on 2 and 4 gloo ranks, and failures between any two writes."""

import pytest
import torch

from dist_lib.comm import RankError, launch
from dist_lib.pulse import CorruptPatchError, Store, Subscriber, digest_state
from dist_lib.pulse.shards import assemble_rows
from tests.distributed import ranks_of_pulse_shards as ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(ranks.all_on_two, world_size=2, args=(str(tmp_path_factory.mktemp("two")),), timeout_s=110)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launch(ranks.all_on_four, world_size=4, args=(str(tmp_path_factory.mktemp("four")),), timeout_s=110)


@pytest.mark.parametrize("name", ["two", "four", "replicas"])
def test_versions_follow_bit_for_bit(name, two, four):
    results = {"two": two, "four": four, "replicas": four}[name]
    world = 2 if name == "two" else 4
    for found in results:
        follow = found["replicas" if name == "replicas" else "follow"]
        assert follow["wrong"] == [] and follow["late"] == 4 and follow["parts"] == [world, 1]
        assert follow["steps"] == [(("anchor" if v == 0 else "patch", v),) for v in range(5)]
        assert follow["sizes"] == [(v, v > 0, v % 2 == 0) for v in range(5)]


def test_a_failed_write_leaves_the_old_or_the_new_version(two):
    cases = two[0]["fail"]
    assert all(other["fail"] == cases or len(other["fail"]) == len(cases) for other in two)
    for rank, found in enumerate(two):
        for who, write, after, first, seen, second, third, steps, right in found["fail"]:
            case = (rank, who, write, after, first, seen, second, third, steps)
            assert right and third == "nothing", case
            if first != "nothing":
                assert ("planted" in first) and (rank == who or "ShardError" in first), case
                assert second == "nothing", case
                assert steps == (("patch", seen + 1),), case  # the base was kept, or found out
    failed = [case for case in cases if case[3] != "nothing"]
    print(f"{len(cases)} failed writes on 2 ranks, {len(failed)} of them in version 1")
    assert {case[4] for case in failed} == {0, 1} and len(failed) >= 10


def test_refusals_reach_every_rank(two):
    for rank, found in enumerate(two):
        told = found["refusals"]
        last = rank == 1
        assert "AgreementError" in told["options"]
        assert told["nonfinite"].startswith("StateError" if last else "ShardError") and "NaN" in told["nonfinite"]
        assert "dimension 0" in told["columns"] and "rename" in told["name"] and told["empty"]
        assert "2 parts, not the 3" in told["parts"]
        assert told["together"].startswith("OSError" if last else "ShardError") and told["stayed"] == 0


@pytest.mark.parametrize(("who", "write", "after", "expected"), [(1, 0, True, 0), (0, 2, False, 0), (0, 2, True, 1)])
def test_a_killed_rank_leaves_the_old_or_the_new_version(tmp_path, who, write, after, expected):
    """Rank 0 writes payload, manifest, marker; rank 1 its payload."""
    folder = str(tmp_path / "run")
    with pytest.raises(RankError):
        launch(ranks.dies, world_size=2, args=(folder, who, write, after), timeout_s=60)
    reader = Subscriber(Store(folder), workers=1)
    reader.poll()
    assert reader.version == expected
    whole = digest_state(assemble_rows(reader.state)).whole
    assert {version for version, right, _ in launch(ranks.takes_over, world_size=2, args=(folder,)) if right} == {
        expected + 1
    }
    reader.poll()
    assert reader.version == expected + 1 and digest_state(assemble_rows(reader.state)).whole != whole


def test_rows_that_do_not_fit_are_refused():
    a, b = torch.zeros(2, 3), torch.ones(3, 3)
    assert torch.equal(assemble_rows({"w[2:5]": b, "w[0:2]": a})["w"], torch.cat([a, b]))
    one = torch.zeros(3)
    assert assemble_rows({"w": one, "v": one})["w"] is one
    bad = (
        {"w[0:2]": a, "w[3:6]": b},
        {"w[1:3]": a},
        {"w[0:2]": a, "w[1:4]": b},
        {"w[0:2]": a, "w": b},
        {"w[0:3]": a},
        {"w[0:2]": a, "w[2:5]": b.double()},
        {"w[0:2]": a, "w[2:5]": b[:, :2]},
        {"w[0:1]": torch.tensor(1.0)},
    )
    for state in bad:
        with pytest.raises(CorruptPatchError, match="do not make a tensor"):
            assemble_rows(state)
    with pytest.raises(ValueError, match="counted from 0"):
        Subscriber(Store("memory://x"), part=(2, 2))
