"""Muon over tensor-parallel parameters: one process's bits, each matrix once, bytes, norms, resuming, refusals."""

import pytest
import torch

from dist_lib.comm import launch
from dist_lib.dmuon.nesting import Nested, choose_way
from dist_lib.ops import newton_schulz, newton_schulz_sharded
from tests.distributed import ranks_of_dmuon_tensor_parallel as ranks

MATRICES = {"up.weight", "down.weight", "mix.weight", "idle.weight"}


@pytest.fixture(scope="module")
def four():
    return {way: launch(ranks.bits, world_size=4, args=(2, 2, way), timeout_s=60) for way in ("gather", "gram")}


def test_nested_owners_have_the_bits_of_one_process(four):
    for found in four["gather"]:
        assert found["differ"] == []
        assert found["histogram"] == {n: 0 if n.startswith("idle") else 3 for n in MATRICES}
    assert {f["place"] for f in four["gather"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_summed_gram_matrices_agree_to_rounding_and_hold_no_whole_momentum(four):
    for found in four["gram"]:
        assert found["ways"]["up.weight"] == found["ways"]["down.weight"] == "gram"
        assert found["ways"]["mix.weight"] == "gather"  # not cut
        assert 0 < found["distance"] < 1e-5
        assert found["histogram"]["up.weight"] == 3
        assert found["held"].get("up.weight", (10, 6)) == (10, 6)
    assert sum("up.weight" in f["held"] for f in four["gram"]) == 2  # the owner's row
    owners = [f for f in four["gather"] if "up.weight" in f["held"]]
    assert [f["held"]["up.weight"] for f in owners] == [(20, 6)]  # the owner alone


@pytest.mark.parametrize("way", ["gather", "gram"])
def test_bytes_are_those_of_the_formula(four, way):
    for found in four[way]:
        assert found["counted"] == found["formula"]
    assert (
        sum(f["counted"].get("send", 0) for f in four["gather"]) == 2 * 2 * 4 * 60
    )  # two matrices, half of each, both ways
    assert all("send" not in f["counted"] for f in four["gram"])


@pytest.mark.parametrize(("data", "tensor", "wide"), [(1, 3, 20), (1, 2, 7), (2, 1, 20)])
def test_uneven_parts_and_meshes_of_one_row_or_column(data, tensor, wide):
    found = launch(ranks.bits, world_size=data * tensor, args=(data, tensor, "gather", False, wide), timeout_s=60)
    assert all(f["differ"] == [] for f in found)


def test_parts_along_the_short_dimension_are_gathered():
    found = launch(ranks.bits, world_size=2, args=(1, 2, "gram", True), timeout_s=60)[0]
    assert found["ways"]["up.weight"] == "gather" and found["ways"]["mix.weight"] == "gram"  # 6 x 6: either is long
    assert found["distance"] < 1e-5


@pytest.mark.parametrize("way", ["gather", "gram"])
def test_training_follows_one_process(way):
    for distance, norms in launch(ranks.learns, world_size=4, args=(2, 2, way, 0.05), timeout_s=60):
        assert distance < 1e-4
        assert all(ours == pytest.approx(theirs, rel=1e-4) for ours, theirs in norms) and norms[0][1] > 0.05


def test_a_resumed_run_takes_the_same_step():
    for differ, wrong in launch(ranks.resumes, world_size=4, args=(2, 2), timeout_s=60):
        assert differ == [] and "fits the same mesh only" in wrong


def test_forgotten_gradients_are_not_used():
    assert launch(ranks.forgets, world_size=2, args=(1, 2), timeout_s=60) == [[], []]


def test_other_first_weights_are_an_error_on_every_rank():
    errors = launch(ranks.unequal, world_size=2, args=(2, 1), timeout_s=60)
    assert all("the first weights of ranks that hold the same parts" in e for e in errors)


def test_faults_are_raised_on_every_rank_and_change_nothing():
    for found in launch(ranks.faults, world_size=2, timeout_s=60):
        assert "gradients hold NaN" in found["raise"] and found["raise"].endswith("unchanged")
        assert found["skip"] == "skipped 1; unchanged"
        assert "one of auto, gather, gram" in found["way"]
        assert "need 'dp' and 'tp'" in found["names"]
        assert "must be float32" in found["half"]
        assert "lies on another mesh" in found["mesh"]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_that_add_up_their_gram_matrices_equal_the_whole(parts):
    """All parts in one process: each in a thread of its own, which wait for one another."""
    import threading

    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 1e-20
    pieces = x.chunk(parts, dim=1)
    barrier, slots, out = threading.Barrier(parts), [None] * parts, [None] * parts

    def combine(index, combine_all):
        def call(t):
            slots[index] = t.clone()
            barrier.wait(10)
            found = combine_all(torch.stack(slots))
            barrier.wait(10)
            return found

        return call

    def work(i):
        largest, total = combine(i, lambda s: s.amax(0)), combine(i, lambda s: s.sum(0))
        out[i] = newton_schulz_sharded(pieces[i], largest=largest, total=total)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(parts)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    expected = newton_schulz(x, form="gram")
    assert torch.allclose(torch.cat(out, 1), expected, atol=2e-5)


def test_the_way_with_fewer_elements_is_chosen():
    assert choose_way((1024, 4096), 1) == "gram" and choose_way((4096, 1024), 0) == "gram"
    assert choose_way((1024, 4096), 0) == "gather"  # the short dimension is cut
    assert choose_way((1024, 2048), 1) == "gather"  # two Gram matrices are as large as the matrix
    assert choose_way((1024, 4096), None) == "gather"
    where = Nested("w", (10, 3), 0, 0, 0, "gather")
    assert where.sizes(4) == [3, 3, 3, 1] and where.part_shape(3, 4) == (1, 3)
    assert Nested("w", (5, 3), 0, 0, 0, "gather").sizes(4) == [2, 2, 1, 0]
