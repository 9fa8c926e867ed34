"""The chapter's figures: what they show is what the library computes, and their descriptions are true."""

import pytest

pytest.importorskip("plotly")

from dist_lib.pulse import figures
from dist_lib.pulse.published import CELLS_7B, CODED, PUBLISHED, PUBLISHED_KS


def shown(fig, **where):
    """Traces that a reader sees with these settings, by name."""
    return {t.name: t for t in fig.data if all((t.meta or {}).get(k, v) == v for k, v in where.items())}


def test_a_weight_without_master_waits_or_overshoots() -> None:
    paths = figures.cell_paths(0.019, 0.45, 8)
    assert paths["stored"] == [0.0] * 9 and paths["cast"] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert paths["master"][-1] == pytest.approx(3.6, abs=1e-2)
    assert figures.cell_paths(0.019, 0.6, 5)["stored"] == [0, 1, 2, 3, 4, 5]
    assert figures.cell_paths(-0.019, 0.0, 2)["master"] == [0, 0, 0]


def test_the_cell_figure_stops_where_the_slider_stands() -> None:
    fig = figures.cell_figure(count=4)
    for n in range(5):
        traces = shown(fig, step=0.6, count=n)
        assert len(traces) == 3 and all(len(t.x) == n + 1 for t in traces.values())
    assert "4 steps of 0.6: 2 and 4" in fig.layout.meta["alt"]


def test_published_curves_are_matched_by_one_regime_only() -> None:
    fig = figures.sparsity_figure(cells=60_000)
    traces = shown(fig, setting=PUBLISHED[0].label)
    assert tuple(traces["published"].y) == PUBLISHED[0].values
    stored, master = (traces[f"simulated, {name}"].y for name in figures.REGIMES.values())
    gaps = [abs(a - b) for a, b in zip(stored, PUBLISHED[0].values, strict=True)]
    assert max(gaps) < 0.2, "the regime that the data fit"
    assert PUBLISHED[0].values[3] - master[3] > 9, "and the one that they do not"
    assert len({c.label for c in PUBLISHED}) == len(PUBLISHED)
    assert all(
        list(c.values) == sorted(c.values, reverse=True) and len(c.values) == len(PUBLISHED_KS) for c in PUBLISHED
    )
    more = figures.sparsity_figure(cells=2_000, recorded={"ours": ((1, 8), (99.0, 98.0))})
    assert tuple(shown(more)["ours"].x) == ("1", "8")


def test_models_and_counts_are_near() -> None:
    fig = figures.models_figure((1e-6, 1e-5), cells=100_000)
    by_name = {t.name: t.y for t in fig.data}
    for model, name in (("threshold", figures.REGIMES["bf16"]), ("crossing", figures.REGIMES["fp32"])):
        assert by_name[f"counted, {name}"] == pytest.approx(by_name[f"{model} model ({name})"], abs=0.12)
    assert by_name[f"counted, {figures.REGIMES['fp32']}"][0] > 2 * by_name[f"counted, {figures.REGIMES['bf16']}"][0]


def test_utilisation_regenerates_the_two_bandwidths() -> None:
    fig = figures.utilisation_figure()
    traces = shown(fig, compute=50.4, counted="transfer only")
    for name, mbit in (("all weights, 14 GB", 20_000), ("patch, 140 MB", 200)):
        points = sorted((abs(x - mbit), y) for x, y in zip(traces[name].x, traces[name].y, strict=True))
        assert points[0][1] == pytest.approx(90, abs=1.5)
    assert "20 Gbit/s" in fig.layout.meta["alt"] and "0.2 Gbit/s" in fig.layout.meta["alt"]
    slower = shown(fig, compute=50.4, counted="transfer and coding")["patch, 140 MB"].y
    assert all(b <= a for a, b in zip(traces["patch, 140 MB"].y, slower, strict=True)) and slower[-1] < 98.5


def test_published_patch_sizes() -> None:
    assert CODED[0].full_ratio(CELLS_7B) == pytest.approx(89.6, abs=0.1)
    for patch in CODED:
        assert 2.8 < patch.nbytes / (patch.density * CELLS_7B) < 4.2


def test_streams_are_reproducible_and_depend_on_the_seed() -> None:
    first, again = (figures.simulated_curve("bf16", 3e-6, (1,), cells=5_000) for _ in range(2))
    assert first == again != figures.simulated_curve("bf16", 3e-6, (1,), cells=5_000, seed=1)
