"""Every value that a CPU can compute is computed afresh by a function of this folder."""

import importlib.util
import sys
from pathlib import Path

import pytest

from dist_lib.claims import load_claims, recomputers

FOLDER = Path(__file__).resolve().parent
COMPUTED = ("reproduced", "same direction", "modelled", "contradicted")


@pytest.fixture(scope="module")
def registered():
    """Names that have a function; modules that this pytest run has not collected are loaded here, once."""
    loaded = {Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    for path in sorted(FOLDER.glob("*recompute_*.py")):
        if path not in loaded:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return set(recomputers())


def needs_a_function(claim):
    return claim.label in COMPUTED and "gpu" not in claim.hardware.lower()


def test_every_cpu_claim_has_a_function(registered):
    missing = [c.id for c in load_claims().values() if needs_a_function(c) and c.id not in registered]
    assert not missing, f"no function under tests/claims recomputes {', '.join(missing)}"


def test_every_function_is_for_a_claim_of_the_ledger(registered):
    assert registered - set(load_claims()) == set()
