"""Pictures of formats, of rounding and of one all-reduce: they draw the library's numbers."""

import pytest
import torch

from dist_lib.agoq import GradientFormat, wire_bytes
from dist_lib.agoq.quality import GradientQuality
from dist_lib.agoq.quantization_figures import (
    FORMATS,
    SHARD_STEPS,
    block_shares,
    errors_figure,
    formats_figure,
    histogram_figure,
    quality_figure,
    ranks_figure,
    reduce_figure,
)
from dist_lib.ops import CODECS, error_table, quantize


def of(fig, key, value, name):
    """The traces of one name for one value of a control."""
    return [t for t in fig.data if (t.meta or {}).get(key) == value and t.name == name]


@pytest.mark.parametrize("codec", FORMATS)
def test_the_drawn_error_is_that_of_the_codec(codec):
    (error,) = of(formats_figure([codec, "fp4" if codec != "fp4" else "nf4"]), "codec", codec, "rounding error")
    assert max(error.y) == pytest.approx(CODECS[codec].half_gap, rel=1e-6)
    inside = [(x, y) for x, y in zip(error.x, error.y, strict=True) if 0.01 < x < 0.99]
    for x, y in inside[:: max(1, len(inside) // 9)]:
        found = quantize(torch.tensor([1.0, x]), codec, 32).dequantize()[1]
        assert abs(float(found) - x) == pytest.approx(y, abs=2e-7)


def test_shares_of_blocks_see_scale_and_skew():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    shares = block_shares(x, 64, 41)
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert block_shares(1000 * x, 64, 41) == shares
    outliers = x.clone()
    outliers[:, ::64] *= 30
    assert block_shares(outliers, 64, 41)[20] > 3 * shares[20]


def test_one_all_reduce_holds_what_its_steps_say():
    fig = reduce_figure(2**20, 4, GradientFormat("int8", 256))
    squares = {s: [t for t in fig.data if t.meta["step"] == s and t.marker.symbol == "square"] for s in SHARD_STEPS}
    assert [sum(len(t.x) for t in squares[s]) for s in SHARD_STEPS] == [16, 16, 16, 4, 4, 16]
    (received,) = squares[SHARD_STEPS[2]]
    assert all(f"shard {rank[-1]}<br>" in text for rank, text in zip(received.y, received.text, strict=True))
    sent = wire_bytes("all_reduce", 2**20, 4, GradientFormat("int8", 256)).sent
    notes = " ".join(t.text[0] for t in fig.data if t.y == (" ",))
    assert f"{sent // 6:,}" in notes and f"{sent:,}" in fig.layout.meta["alt"]


def test_measured_pictures_draw_what_they_are_given():
    table = {(s, c): GradientQuality(0.1 * i, 1.0) for i, (s, c) in enumerate([("a", "x"), ("b", "x")], 1)}
    assert list(quality_figure(table).data[0].x) == [0.1, 0.2]
    fig = ranks_figure({"int8": {"ring": {2: 0.1, 4: 0.2}}, "e4m3": {"ring": {2: 0.3, 4: 0.4}}})
    assert list(of(fig, "codec", "e4m3", "ring")[0].y) == [0.3, 0.4]
    rows = list(error_table(codecs=("fp4", "int8"), block_sizes=(64,), distributions=("gaussian",), count=2**12))
    rows += list(error_table(codecs=("fp4",), block_sizes=(64,), distributions=("silu*normal",), count=2**12))
    assert len(of(errors_figure(rows), "kind", "gaussian", "blocks of 64")[0].x) == 2
    found = {"norm": {0: [0.2, 0.6, 0.2], 1: [0.1, 0.8, 0.1]}, "out": {0: [0.3, 0.4, 0.3], 1: [0.2, 0.6, 0.2]}}
    shown = [t for t in histogram_figure(found, title="Histograms").data if t.visible]
    assert list(shown[0].y) == [0.2, 0.6, 0.2] and len(shown) == 2
