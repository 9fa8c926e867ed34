"""The launcher: results, the failing rank's traceback, timeouts, no orphans."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from dist_lib.comm import LaunchTimeout, RankError, launch
from tests.comm.ranks_of_launcher import (
    die_on,
    fail_on,
    fail_while_others_sleep,
    hang_on,
    rank_and_sum,
    report_pid,
    return_unmakeable,
    stay_away,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size):
    results = launch(rank_and_sum, world_size=world_size, args=(10,))
    assert [r[0] for r in results] == list(range(world_size))
    expected = sum(range(world_size)) + 10 * world_size
    assert all(r[1] == world_size and r[2].item() == expected for r in results)


def test_the_failing_ranks_own_traceback_reaches_the_caller():
    with pytest.raises(RankError, match="the planted fault") as caught:
        launch(fail_on, world_size=3, args=(1,))
    assert caught.value.rank == 1
    assert "about to fail" in str(caught.value)


def test_a_killed_rank_is_named_within_seconds():
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 2 of 3 was killed by signal 9"):
        launch(die_on, world_size=3, args=(2,), timeout_s=50)
    assert time.monotonic() - begin < 15  # the group's own timeout would be 30 s


@pytest.mark.parametrize(("how", "message"), [("killed", "rank 1 of 3 was killed by signal 9"), ("raised", "planted")])
def test_ranks_that_notice_nothing_are_ended_soon_after_a_failure(how, message):
    begin = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        launch(fail_while_others_sleep, world_size=3, args=(how,), timeout_s=50)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 15


def test_a_hang_names_the_rank_and_its_last_output():
    with pytest.raises(LaunchTimeout, match="hello from 0") as caught:
        launch(hang_on, world_size=2, args=(0,), timeout_s=3)
    assert caught.value.ranks == [0]


def test_output_is_handed_on_line_by_line():
    seen = []
    launch(hang_on, world_size=2, args=(7,), on_output=lambda rank, line: seen.append((rank, line)))
    assert sorted(seen) == [(0, "hello from 0"), (1, "hello from 1")]


def test_many_launches_leave_no_file_and_no_process(tmp_path, monkeypatch):
    pids = launch(report_pid, world_size=2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        pids += launch(report_pid, world_size=2)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not multiprocessing.active_children()
    assert len(set(pids)) == 42 and not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not list(tmp_path.iterdir())


def test_a_collective_that_a_rank_never_joins_ends_at_the_groups_timeout():
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"(?i)timed out") as caught:
        launch(stay_away, world_size=2, args=(1,), group_timeout_s=2.0, timeout_s=50)
    assert caught.value.rank == 0
    assert time.monotonic() - begin < 30


def test_a_result_that_cannot_be_made_again_is_the_ranks_error():
    with pytest.raises(RankError, match="return plain data"):
        launch(return_unmakeable, world_size=1)


def test_a_dead_parent_leaves_no_orphans(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, time
            from dist_lib.comm import launch
            def work():
                import torch.distributed as dist
                open({str(tmp_path)!r} + f"/pid{{dist.get_rank()}}", "w").write(str(os.getpid()))
                time.sleep(60)
            if __name__ == "__main__":
                launch(work, world_size=2)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 40
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(f.read_text()) for f in files]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_functions_that_cannot_be_shipped_are_refused_clearly():
    with pytest.raises(ValueError, match="top level"):
        launch(lambda: 1, world_size=1)
    with pytest.raises(ValueError, match="at least 1 process"):
        launch(rank_and_sum, world_size=0)


def test_a_script_that_launches_while_it_is_imported_is_told_what_to_write(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("from dist_lib.comm import launch\ndef work():\n    return 1\nlaunch(work, world_size=2)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "before it began" in done.stderr and "if __name__ == '__main__':" in done.stderr


LATE_RANK = """
import multiprocessing, sys
from dist_lib.comm import launcher

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    _, send = context.Pipe(duplex=False)
    watched, hold = context.Pipe(duplex=False)  # `hold` stays open: the rank must see that its folder is gone
    job = launcher._Job("os", "getpid", None, b"", sys.argv[1], 1, "cpu", 5.0, 1)
    process = context.Process(target=launcher._rank_main, args=(0, job, send, watched), daemon=True)
    process.start()
    process.join(60)
    print("exit code", process.exitcode)
"""


def test_a_rank_that_starts_after_its_launch_was_interrupted_ends_without_a_word(tmp_path):
    (tmp_path / "late.py").write_text(LATE_RANK)
    command = [sys.executable, str(tmp_path / "late.py"), str(tmp_path / "removed")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=90)
    assert (done.stdout, done.stderr) == ("exit code 1\n", "")
