"""The methods owner-sharded Muon is compared with: the same weights, each by its own way and with its own bytes."""

import pytest

from dist_lib.comm import launch
from tests.distributed.ranks_of_dmuon_baselines import everything


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_weights_and_bytes_of_the_formulas(world_size):
    for rank, found in enumerate(launch(everything, world_size=world_size, timeout_s=110)):
        assert found == {"reference": {}, "bytes": {}}, f"rank {rank}"
