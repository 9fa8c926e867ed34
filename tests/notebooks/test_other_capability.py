"""A trained notebook must hold on another processor: it is run with torch's plain kernels and compared as always."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAINED = "book/muon/reproduction.ipynb"  # the shortest notebook that trains: two optimizers, three seeds
# Kernels of ATen, oneDNN and MKL for a processor without AVX. Their sums add in another order than AVX2 or AVX512.
PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def witness(path: Path) -> Path:
    """Write a notebook that passes only where its kernel really runs with the plain capability."""
    v4 = nbformat.v4
    source = "import torch\nprint(torch.backends.cpu.get_cpu_capability())"
    cell = v4.new_code_cell(source, execution_count=1, outputs=[v4.new_output("stream", text="DEFAULT\n")])
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(v4.new_notebook(cells=[cell], metadata=metadata), path)
    return path


def run_nbval(changes: dict[str, str], *notebooks: str | Path) -> tuple[int, str]:
    """Run notebooks under a changed environment with the book's comparison."""
    options = ["-p", "tests.notebooks.plugin", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    limits = ["--nbval-cell-timeout", "100", "--timeout", "115"]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *options, *limits, *map(str, notebooks)]
    environment = os.environ | changes
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=118)
    return done.returncode, done.stdout + done.stderr


def needs_another_capability() -> None:
    own = torch.backends.cpu.get_cpu_capability()
    if own == "DEFAULT":
        pytest.skip("torch has only its DEFAULT capability on this processor: there is no other one to compare with")


def test_a_trained_notebook_holds_under_another_capability(tmp_path: Path) -> None:
    needs_another_capability()
    status, output = run_nbval(PLAIN, witness(tmp_path / "capability.ipynb"), TRAINED)
    assert status == 0, output
    assert "failed" not in output and "skipped" not in output


def test_the_witness_fails_under_the_machines_own_capability(tmp_path: Path) -> None:
    needs_another_capability()
    own = torch.backends.cpu.get_cpu_capability()
    status, output = run_nbval({"ATEN_CPU_CAPABILITY": own.lower()}, witness(tmp_path / "capability.ipynb"))
    assert status == 1, output
    assert own in output
