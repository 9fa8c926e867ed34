"""Figures of PULSELoCo's gate: conservation holds in what they show, and the fault shows."""

import pytest

pytest.importorskip("plotly")
pytest.importorskip("zstandard")

from dist_lib.pulse import loco_figures


def test_sent_and_kept_add_up_in_each_round() -> None:
    fig = loco_figures.gate_figure(rounds=12)
    for update in {t.meta["update"] for t in fig.data}:
        traces = {t.name: t.y for t in fig.data if t.meta["update"] == update}
        for sent, kept, wanted in zip(*(traces[n] for n in traces), strict=True):
            assert sent + kept == pytest.approx(wanted, abs=2e-4)
        assert any(traces["kept in the buffer"]) and traces["sent so far"][-1] > 0


def test_the_gate_stays_shut_until_a_border_is_reached() -> None:
    paths = loco_figures.gate_paths(0.019, 0.2, 3)
    assert paths["sent"] == [0, 0, 0, pytest.approx(0.6, abs=1e-3)] and paths["kept"][2] == pytest.approx(0.4, abs=1e-3)


def test_cast_error_fires_the_gate_and_the_right_start_does_not() -> None:
    fig = loco_figures.cast_error_figure(rounds=12)
    right, wrong = (t.y for t in fig.data)
    assert not any(right) and wrong[0] < 1 and wrong[-1] > 8
    assert "after 12 rounds" in fig.layout.meta["alt"]


def test_density_grows_with_the_round_and_the_rate() -> None:
    fig = loco_figures.gate_density_figure((1e-6, 3e-6), (1, 8), rounds=3, cells=5_000)
    slow, fast, save_slow, save_fast, paper = (t.y for t in fig.data)
    assert slow[0] < fast[0] < fast[1] and slow[1] < fast[1]
    assert save_slow[0] > save_fast[0] > save_fast[1]
    assert save_fast[1] < paper[1], "independent noise does not reach the published ratio"
    assert [bool(t.visible) for t in fig.data] == [True, True, False, False, False]
