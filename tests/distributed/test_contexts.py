"""Where a process stands: alone, nested, under torchrun, in a notebook."""

import os
import subprocess
import sys

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient

from dist_lib.comm import choose_device, distributed, launch
from dist_lib.comm import collectives as c

SETUP = """
import torch
import torch.distributed as dist
from torch import ones
from dist_lib.comm import launch
from dist_lib.comm import collectives as c
STEPS = 3
KIND = torch.float64
data = (step for step in range(3))  # does not pickle; only attributes have this name below

def helper(x):
    return x * STEPS
"""
WORK = """
def work(n: int, kind: torch.dtype = KIND, steps=STEPS):
    t = helper(ones(n, dtype=kind))
    c.all_reduce(t)
    return t.data.sum().item(), str(t.dtype), steps

launch(work, world_size=2, args=(5,))
"""
FAIL = """
def fail():
    raise KeyError("planted in a cell")

launch(fail, world_size=2)
"""
OWN_CLASS = """
class Plan:
    pass

def plan(p):
    return 1

launch(plan, world_size=1, args=(Plan(),))
"""
NAMED_CLASS = """
def make():
    return Plan()

launch(make, world_size=1)
"""
BIG = """
big = torch.zeros(100_000)

def use():
    return big.sum()

launch(use, world_size=1)
"""


def test_a_plain_process_is_a_world_of_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    with distributed(device="cpu") as ctx:
        assert (ctx.rank, ctx.world_size, ctx.backend, ctx.is_main) == (0, 1, "gloo", True)
        assert c.all_reduce(torch.ones(3), group=ctx.group).tolist() == [1.0] * 3
        with distributed(device="cpu") as again:
            assert again.rank == 0
        assert dist.is_initialized()  # the inner one did not make the group, so it does not destroy it
    assert not dist.is_initialized()


def test_the_group_is_destroyed_after_an_error(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(KeyError), distributed(device="cpu"):
        raise KeyError("planted")
    assert not dist.is_initialized()


def test_half_a_torchrun_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE.*start with torchrun, or unset RANK"), distributed(device="cpu"):
        pass


def test_devices_are_chosen_alike_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1, 2) == torch.device("cuda", 1)
    assert choose_device("auto", 0, 4) == torch.device("cpu")  # too few for all: nobody takes one
    with pytest.raises(ValueError, match="no GPU of its own"):
        choose_device("cuda", 2, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="allowed are"):
        choose_device("tpu")


def outside_environment():
    with distributed() as ctx:
        return ctx.rank, ctx.local_rank, ctx.world_size


def test_launch_inside_a_torchrun_environment_does_not_take_its_ranks(monkeypatch):
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(outside_environment, world_size=2) == [(0, 0, 2), (1, 1, 2)]


def test_torchrun(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(
        "import torch\n"
        "from dist_lib.comm import collectives as c, distributed\n"
        "with distributed(device='cpu') as ctx:\n"
        "    total = c.all_reduce(torch.tensor([ctx.rank + 1.0]))\n"
        f"    open({str(tmp_path)!r} + f'/rank{{ctx.rank}}', 'w').write(f'{{ctx.world_size}} {{total.item():g}}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in range(2)] == ["2 3", "2 3"]


def test_functions_of_notebook_cells_are_launched_or_refused_clearly():
    """mp.spawn fails here with an error about pickling; ours runs, and shows a cell's own traceback."""
    cells = [SETUP, WORK, FAIL, OWN_CLASS, NAMED_CLASS, BIG]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=100, allow_errors=True, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == []
    assert (
        outputs[1][-1].get("data", {}).get("text/plain") == "[(30.0, 'torch.float64', 3), (30.0, 'torch.float64', 3)]"
    )
    errors = [(o[-1]["ename"], o[-1]["evalue"]) for o in outputs[2:]]
    assert errors[0][0] == "RankError" and "planted in a cell" in errors[0][1] and "in fail" in errors[0][1]
    assert errors[1][0] == "ShipError" and "'Plan', which is defined in this notebook" in errors[1][1]
    assert errors[2][0] == "ShipError" and "class 'Plan'" in errors[2][1]
    assert errors[3][0] == "ShipError" and "args=" in errors[3][1]


def test_a_context_does_not_keep_its_group_alive():
    """A referenced group outlives destroy_process_group; its threads then aborted 2 of 8 torchrun runs at exit."""
    with distributed(device="cpu") as ctx:
        assert ctx.group.size() == 1
        assert not [v for v in vars(ctx).values() if isinstance(v, dist.ProcessGroup)]
    with pytest.raises(RuntimeError, match="inside its with block"):
        _ = ctx.group
