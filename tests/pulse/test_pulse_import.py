"""Importing the package is light, and a missing extra says which and how to install it."""

import subprocess
import sys

CODE = """
import sys
{block}
import dist_lib.pulse as pulse
heavy = [m for m in ("numba", "zstandard", "fsspec", "cryptography", "safetensors") if m in sys.modules]
assert {expect!r} or not heavy, heavy
import torch
try:
    pulse.encode(pulse.diff({{"w": torch.zeros(9)}}, {{"w": torch.ones(9)}}), "fast")
except pulse.PulseError as error:
    print(error)
"""


def _run(block: str) -> str:
    code = CODE.format(block=block, expect=bool(block))
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light_and_missing_packages_are_named() -> None:
    assert _run("") == ""
    for package in ("numba", "zstandard"):
        text = _run(f"sys.modules[{package!r}] = None")
        assert f"needs the package {package}" in text and "dist-lib[pulse]" in text
