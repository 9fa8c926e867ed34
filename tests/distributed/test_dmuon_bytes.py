"""Bytes on the wire, counted at the dispatcher, equal the formulas as integers on every rank and in every mode."""

import pytest

from dist_lib.comm import launch
from tests.distributed.ranks_of_dmuon_bytes import count_steps


@pytest.mark.parametrize(
    ("world", "modes"),
    [(3, ["ddp", "fsdp-keep", "fsdp-free"]), (4, ["hsdp-keep", "hsdp-free"])],
    ids=["one-level", "two-levels"],
)
def test_counted_bytes_equal_the_formulas(world, modes):
    for rank, found in enumerate(launch(count_steps, world_size=world, args=(modes,))):
        for mode in modes:
            counted, predicted = found[mode]
            assert counted == predicted, (rank, mode)
            assert min(counted.values()) > 0
