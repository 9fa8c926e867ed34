"""Values of the Muon chapter in the ledger, computed afresh."""

import numpy as np
import pytest
import torch

from dist_lib.claims import load_claims, recomputes
from dist_lib.ops import newton_schulz, newton_schulz_flops, resolve, scalar_map
from dist_lib.optim import update_scale


def _band(name):
    y = scalar_map(np.geomspace(3e-3, 1, 20_001), resolve(name, 5))
    return f"{y.min():.2f} to {y.max():.2f}"


@recomputes("muon-band-keller")
def band_keller():
    return _band("keller")


@recomputes("muon-band-polar-express")
def band_polar_express():
    return _band("polar_express")


@recomputes("muon-flops-ratio-2048x22016")
def flops_ratio():
    return newton_schulz_flops(2048, 22016) / newton_schulz_flops(2048, 22016, form="gram")


@recomputes("muon-update-rms")
def update_rms():
    noise = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    return float((update_scale("match_rms_adamw", 256, 512) * newton_schulz(noise)).square().mean().sqrt())


@pytest.mark.parametrize(
    ("claim_id", "compute"),
    [
        ("muon-band-keller", band_keller),
        ("muon-band-polar-express", band_polar_express),
        ("muon-flops-ratio-2048x22016", flops_ratio),
        ("muon-update-rms", update_rms),
    ],
)
def test_the_ledger_holds_what_is_computed(claim_id, compute):
    claim = load_claims()[claim_id]
    value = compute()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"
