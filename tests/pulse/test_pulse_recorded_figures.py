"""Figures of records: shares are of the right totals, means are over seeds."""

import pytest
import torch

pytest.importorskip("plotly")

from dist_lib.pulse import recorded_figures as figures


def test_exponents_by_hand() -> None:
    old = torch.tensor([1.0, 1.5, 0.25, 0.0, -1.0]).bfloat16()
    new = torch.tensor([1.0, 1.25, 0.25, -0.0, -1.0]).bfloat16()
    assert figures.exponents_of(old, new) == [(-127, 1, 1), (-2, 1, 0), (0, 3, 1)]


def test_shares_sum_to_all_cells_and_small_exponents_are_joined() -> None:
    exponents = [(-40, 10, 10), (-30, 10, 9), (-9, 40, 10), (-5, 140, 1)]
    fig = figures.exponents_figure({"one": exponents, "two": [(-5, 4, 1)]})
    cells, changed, share = (t for t in fig.data if t.meta["stream"] == "one")
    assert tuple(cells.x) == (-18, -9, -5) and sum(cells.y) == pytest.approx(100)
    assert tuple(changed.y) == pytest.approx((100 * 19 / 30, 100 / 3, 100 / 30), abs=1e-3)
    assert tuple(share.y) == pytest.approx((95, 25, 100 / 140), abs=1e-3)
    assert "one: most cells change up to exponent -18; two: none" in fig.layout.meta["alt"]


def test_means_over_seeds_and_a_control_for_rates() -> None:
    def run(storage, lr, one, optimizer="adamw"):
        return {"optimizer": optimizer, "storage": storage, "lr": lr, "sparsity": {"1": one, "16": one - 4}}

    runs = [run("fp32", 1e-6, 98.0), run("fp32", 1e-6, 99.0), run("bf16", 3e-6, 97.0, "muon")]
    fig = figures.rl_figure(runs)
    by_name = {t.name: t for t in fig.data}
    assert tuple(by_name["AdamW, FP32 master"].y) == (98.5, 94.5) and by_name["AdamW, FP32 master"].visible
    assert by_name["Muon, stored in BF16"].meta == {"lr": "3e-6"} and not by_name["Muon, stored in BF16"].visible
    assert not figures.rl_figure(runs[:2]).layout.meta["controls"]
    with pytest.raises(ValueError, match="no runs"):
        figures.rl_figure([])


def test_links_measured_beside_the_closed_form() -> None:
    def row(mode, rate, measured, model):
        return {"mode": mode, "megabits_per_s": rate, "subscribers": 1, "median_s": measured, "closed_form_s": model}

    rows = [
        row("patch", None, 0.1, 0.1),
        row("patch", 1000.0, 0.4, 0.38),
        row("patch", 100.0, 0.5, 0.4),
        row("full", 100.0, 20, 21),
    ]
    fig = figures.link_figure(rows)
    by_name = {t.name: t for t in fig.data}
    assert tuple(by_name["patch, measured"].y) == (0.5, 0.4) and tuple(by_name["full copy, measured"].y) == (20,)
    assert tuple(by_name["closed form"].y) == (21, 0.4, 0.38)
    assert [x.split("<br>")[:2] for x in by_name["closed form"].x[1:]] == [["patch,", "100"], ["patch,", "1000"]]
    assert "3 settings" in fig.layout.meta["alt"] and "a full copy over 100 Mbit/s" in fig.layout.meta["alt"]
    with pytest.raises(ValueError, match="no shaped link"):
        figures.link_figure(rows[:1])
