"""The README's picture is what the script draws, and every link of the README leads somewhere."""

import re
import tomllib
from pathlib import Path

from dist_lib.step_model import Scenario
from tools.readme_picture import PICTURE, SHOWN, draw

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_picture_is_current() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(Scenario()), "run .venv/bin/python tools/readme_picture.py"


def test_the_picture_shows_every_method_and_another_scenario_differs() -> None:
    assert draw(Scenario()).count("step ") >= len(SHOWN)
    assert draw(Scenario()) != draw(Scenario(micro_batches=16))


def test_links_of_the_readme_lead_to_files() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", README) for link in link]
    local = [link for link in links if link and not link.startswith("http")]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_readme_names_every_make_target_that_it_uses() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in {a or b for a, b in re.findall(r"`make ([a-z]+)\b|^make ([a-z]+)\b", README, re.MULTILINE)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_names_the_supported_pythons() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert wanted == ">=3.11,<3.14"
    assert "3.11, 3.12 or 3.13" in README
