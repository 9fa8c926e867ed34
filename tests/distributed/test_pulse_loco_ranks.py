"""Several workers hold the same bits after every round, lose nothing, and hear of every mistake and death."""

import multiprocessing

import pytest

from dist_lib.comm import launch
from dist_lib.pulse.loco_checkpoint import checkpoints
from dist_lib.pulse.loco_config import dense_counted_bytes, sparse_counted_bytes
from tests.distributed import ranks_of_pulse_loco as ranks

WORLD = 4
RUNS = (("pulse", "adamw"), ("pulse", "muon"), ("diloco", "muon"), ("ddp", "adamw"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loco")


@pytest.fixture(scope="module")
def found(folder):
    """What each rank saw, by scenario: one start of the processes for all of them."""
    results = launch(ranks.everything, world_size=WORLD, args=(folder, RUNS), timeout_s=300)
    return {name: [result[name] for result in results] for name in results[0]}


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_all_workers_hold_the_same_bits_after_every_round_and_send_what_formulas_say(found, run):
    kind, results = run[0], [result[run] for result in found["trains"]]
    rounds = [metrics for metrics, *_ in results]
    assert len(rounds[0]) == (8 if kind == "ddp" else 4)
    for row in zip(*rounds, strict=True):
        assert len({m.digest for m in row}) == 1 and row[0].digest
        assert len({m.union_cells for m in row}) == 1
        largest = max(m.payload_bytes for m in row)
        for m in row:
            sparse = sparse_counted_bytes(largest)
            assert m.counted_bytes == (sparse if kind == "pulse" else dense_counted_bytes(m.cells, WORLD))
            assert max(n.sent_cells for n in row) <= m.union_cells <= sum(n.sent_cells for n in row)
    for metrics, counted, weights, _, theta in results:
        assert counted == sum(m.counted_bytes for m in metrics)
        assert weights == results[0][2] == theta
    if kind == "pulse":
        assert all(0 < m.gate_density < 1 for row in rounds for m in row)
        assert len({str(error) for *_, error, _ in results}) == WORLD  # buffers are private


def test_the_loop_equals_the_algorithm_written_out_densely(found):
    for unions in found["by hand"]:
        assert all(wanted == counted > 0 for wanted, counted in unions)


@pytest.mark.parametrize("at", [4, 5])
def test_a_checkpoint_within_a_round_or_between_changes_no_bit(found, folder, at):
    for (straight, second), path, resumed in (result[at] for result in found["stops"]):
        assert straight == second
        assert path == resumed.path == folder / f"stops-{at}" / f"round-{at // 2:08d}-step-{at % 2:06d}"
        assert (resumed.round, resumed.inner_step, resumed.joined, resumed.adopted) == (at // 2, at % 2, (), {})


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_a_worker_whose_values_are_not_finite_is_left_out_by_all_and_comes_back(found, kind):
    results = [result[kind] for result in found["poisoned"]]
    for rank, (dropped, sent, kept, state, later, finite, theta) in enumerate(results):
        assert dropped == (1,) and later == () and finite and theta == results[0][-1]
        assert (sent == 0) == (rank == 1)
        assert (state == 0) == (rank == 1 and kind != "ddp")  # its inner optimizer starts anew
        if kind == "pulse":
            assert kept == (rank == 1)  # its buffer is the former one


def test_without_any_finite_worker_all_stop(found):
    for text in found["all poisoned"]:
        assert text.startswith("NonFiniteError: round 1: no worker has finite values")


AGREEMENT = f"AgreementError: ranks [1] of {WORLD} hold another value of "
SEEN = {
    "options": (AGREEMENT + "the method, options and parameters",) * 2,
    "method": (AGREEMENT + "the method, options and parameters",) * 2,
    "weights": (AGREEMENT + "the first weights",) * 2,
    "drift": (AGREEMENT + "parameters and momentum after round 1",) * 2,
    "what": (
        "DesyncError: the workers do different things (round.step): rank 0: round at 0.2, rank 1: save at 0.0",
    ) * 2,
    "state": ("StateError: the state's format is 2; this loop needs 1", "DesyncError: ranks [1] refused their states"),
    "mixed": (AGREEMENT + "round, inner step, parameters and momentum",) * 2,
    "damaged": ("StateError: the state's format is", "DesyncError: ranks [1] refused their states"),
}  # fmt: skip


def test_mistakes_are_errors_on_every_worker(found):
    for rank, results in enumerate(found["refused"]):
        results = dict(results)
        assert results.pop("nowhere") is None and results.pop("then") == 1
        assert results.keys() == SEEN.keys()
        for mistake, text in results.items():
            assert text.startswith(SEEN[mistake][rank != 1]), (rank, mistake, text)
        assert rank != 1 or "missing or damaged" in results["damaged"]


def test_more_workers_join_with_empty_buffers(found):
    results = [result["more"] for result in found["elastic"]]
    saved = [result["saved"] for result in found["elastic"]]
    for rank, (resumed, (theta, momentum, error), digest, number) in enumerate(results):
        assert (resumed.saved_workers, resumed.adopted, resumed.joined) == (3, {}, (3,))
        assert theta == saved[0][0] and momentum == saved[0][1] and number == 4 and digest == results[0][2]
        assert error == (saved[rank][2] if rank < 3 else [0.0] * len(error))


def test_fewer_workers_take_over_buffers_from_the_last_checkpoint_between_rounds(found):
    saved = [result["saved"] for result in found["elastic"]]
    results = [result["fewer"] for result in found["elastic"][:2]]
    for rank, (resumed, (theta, momentum, error), digest, number) in enumerate(results):
        assert (resumed.round, resumed.inner_step, number) == (3, 0, 4)  # the newer one, of 3.1, needs three workers
        assert (resumed.saved_workers, resumed.adopted, resumed.joined) == (3, {0: (2,)}, ())
        assert theta == saved[0][0] and momentum == saved[0][1] and digest == results[0][2]
        wanted = saved[rank][2] if rank else [sum(pair) for pair in zip(saved[0][2], saved[2][2], strict=True)]
        assert error == pytest.approx(wanted, rel=1e-6, abs=0) and any(error)


def test_data_parallelism_is_that_of_torch_on_two_workers(found):
    for ours, theirs, sent, reduced, cells in found["twin"][:2]:
        assert ours == theirs
        assert reduced == 3 * 4 * cells and sent == 3 * dense_counted_bytes(cells, 2)


def test_a_worker_that_hangs_is_given_up_within_the_timeout(found):
    *others, last = found["hangs"]
    assert last == ("came back", "", WORLD - 1)  # it saw all others give up
    for rank, (error, again, _) in enumerate(others):
        assert error.startswith(f"WorkerLostError: rank {rank} of {WORLD}: the header of 'round' failed after"), error
        assert "resume() from the last complete checkpoint" in error
        assert again.startswith("PulseError: this loop stopped in the middle of a round")


def test_a_killed_worker_is_an_error_on_the_others_who_go_on_from_the_last_complete_round(tmp_path):
    victim, context = 0, multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "dist_lib.comm.launcher"])
    processes = [context.Process(target=ranks.dies, args=(r, str(tmp_path), 3, victim)) for r in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive and processes[victim].exitcode == -9
    for rank in {0, 1, 2} - {victim}:
        assert (tmp_path / f"rank-{rank}").read_text().startswith(f"WorkerLostError: rank {rank} of 3: ")
    assert [(c[0], c[1]) for c in checkpoints(tmp_path / "saved")] == [(1, 0), (2, 0)]
    found = launch(ranks.continues, world_size=2, args=(tmp_path / "saved",), timeout_s=90)
    assert all(resumed.round == 2 and number == 3 for resumed, _, _, number in found)
    assert found[0][2] == found[1][2]
