"""The self-check: passes on a supported model, and says what is wrong with another."""

import pytest

from dist_lib.dmuon.cli import main
from dist_lib.dmuon.verify import verify_model
from tests.distributed.ranks_of_dmuon_verify import build, loss


def test_passes_on_three_ranks():
    report = verify_model(build, loss, world_size=3, steps=2)
    assert report.ok, report.text()
    assert len(report.checks) == 6
    assert "bit for bit" in report.text()


def test_command_line(capsys):
    assert main(["verify", "--steps", "2", "--mode", "fsdp-free"]) == 0
    assert "bytes of the formulas" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("build,loss_that_changes", "FAIL  weights as on one process"),
        ("unsupported,loss", "sparse=False"),
        ("build,nothing", "give module:build,loss"),
    ],
)
def test_says_what_is_wrong(factory, message, capsys):
    assert main(["verify", "--steps", "2", "--factory", f"tests.distributed.ranks_of_dmuon_verify:{factory}"]) == 2
    assert message in capsys.readouterr().err


def test_arguments():
    with pytest.raises(ValueError, match="at least 2 steps"):
        verify_model(build, loss, steps=1)
