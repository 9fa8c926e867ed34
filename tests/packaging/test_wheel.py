"""The wheel of `dist_lib`, imported in a venv of its own that holds torch, numpy and what those two need, nothing else.

torch is large, so the venv does not install it again: it links the installed files of exactly those distributions that
the wheel's core requirements reach.
"""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return every installed distribution that the named ones need, extras left out."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another platform or build
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """Link the top-level folders and files of an installed distribution into `target`."""
    for path in {Path(str(file)).parts[0] for file in distribution.files or [] if ".." not in Path(str(file)).parts}:
        source = Path(str(distribution.locate_file(path)))
        if path not in {"__pycache__", "bin"} and source.exists() and not (target / path).exists():
            (target / path).symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    for name in ("dist_lib", "pyproject.toml", "README.md", "LICENSE", "data"):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(out), str(source)], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("dist_lib-*.whl"))


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    packages = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    lines = [line.split(":", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    core = [requirement.name for line in lines if "extra" not in str((requirement := Requirement(line)).marker)]
    assert sorted(core) == ["numpy", "torch"]
    for distribution in closure(core).values():
        link(distribution, packages)
    return folder / "bin" / "python"


def run(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, check=False, timeout=100, cwd=python.parent
    )


def test_core_imports_with_core_requirements_only(clean_python: Path) -> None:
    code = """
import importlib, importlib.util
for absent in ("plotly", "rich", "typer", "transformers", "scipy", "pytest"):
    assert importlib.util.find_spec(absent) is None, absent
import dist_lib
assert "site-packages" in dist_lib.__file__, dist_lib.__file__
for name in ("comm", "ops", "optim", "models", "tasks"):
    importlib.import_module("dist_lib." + name)
print("ok")
"""
    done = run(clean_python, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ok"]


def test_importing_the_package_is_light(clean_python: Path) -> None:
    code = "import sys, dist_lib; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = run(clean_python, code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_clean_venv_is_clean(clean_python: Path) -> None:
    done = run(clean_python, "import plotly")
    assert "ModuleNotFoundError" in done.stderr


def test_the_wheel_holds_the_library_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        assert "dist_lib/py.typed" in archive.namelist()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dist_lib"}
