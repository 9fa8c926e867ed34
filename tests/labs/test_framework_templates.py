"""The start scripts: valid shell, a mistake is named, and the Slurm script asks for what it says."""

import os
import subprocess
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).resolve().parents[2] / "labs" / "templates"


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_valid_shell_and_explain_themselves(name):
    path = TEMPLATES / name
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run([str(path)], capture_output=True, text=True, check=False, env=clean)
    assert (
        done.returncode != 0
        and f"labs/templates/{name}" in done.stdout
        and "#" not in done.stdout.replace("#SBATCH", "")
    )


def test_an_unknown_lab_is_named():
    done = subprocess.run([str(TEMPLATES / "torchrun.sh"), "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no lab 'nothing'" in done.stderr


def fake(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_slurm_starts_one_torchrun_a_node_at_the_first_nodes_address(tmp_path):
    fake(tmp_path, "scontrol", "printf 'node3\\nnode4\\n'")
    fake(tmp_path, "srun", 'printf "%s " "$@"')
    slurm = {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_ID": "70001", "SLURM_JOB_NUM_NODES": "2"}
    environment = {**os.environ, **slurm, "SLURM_GPUS_ON_NODE": "4", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(TEMPLATES / "slurm.sbatch"), "baseline", "--scale", "cluster"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2 --nproc-per-node 4" in done.stdout and "--rdzv-endpoint node3:30001" in done.stdout
    assert done.stdout.rstrip().endswith("-m labs.baseline.run --scale cluster")


def test_torchrun_starts_the_asked_for_processes_on_several_machines(tmp_path):
    (tmp_path / "labs" / "templates").mkdir(parents=True)
    (tmp_path / "labs" / "baseline").mkdir()
    (tmp_path / "labs" / "baseline" / "run.py").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script = tmp_path / "labs" / "templates" / "torchrun.sh"
    script.write_text((TEMPLATES / "torchrun.sh").read_text())
    fake(tmp_path / ".venv" / "bin", "python", 'if [ "$1" = -c ]; then echo 0; else printf "%s " "$@"; fi')
    several = {"NODES": "2", "NODE": "1", "MASTER": "first:29500", "PROCESSES": "3"}
    for extra, words in (
        ({}, "--standalone --nproc-per-node 2 -m labs.baseline.run --scale ranks"),
        (several, "--master-addr first --master-port 29500 --nproc-per-node 3 -m labs.baseline.run --scale ranks"),
    ):
        command = ["bash", str(script), "baseline", "--scale", "ranks"]
        done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr
