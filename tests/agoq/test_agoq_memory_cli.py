"""The commands of the memory model and its figures."""

import json

import pytest

from dist_lib.agoq.cli import main
from dist_lib.agoq.figures import (
    KINDS,
    device_figure,
    layer_figure,
    published_figure,
    speed_figure,
    stages_figure,
)
from dist_lib.agoq.layer_memory import LAYOUT_NAMES, LayerShape, layer_units, statistics_bytes
from dist_lib.agoq.memory_model import SYSTEM_NAMES, SYSTEMS, Training, peak, stage_memory
from dist_lib.agoq.memory_report import GPUS
from dist_lib.commands import table
from dist_lib.models import get_config

RUN = ["--model", "llama3-8b", "--seq", "32k", "--tp", "8", "--pp", "4"]
TRAINING = Training(config=get_config("llama3-8b"), seq=32 * 1024, tensor=8, stages=4)


def shown(fig, **state):
    return [t for t in fig.data if all((t.meta or {}).get(k, v) == v for k, v in state.items())]


def command(capsys, *args):
    status = main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def test_memory_prints_tables(capsys):
    status, out, _ = command(capsys, "memory", *RUN, "--gpu", "a6000", "--rule", "budget")
    assert status == 0
    assert "8.03 billion parameters" in out and "32 devices" in out and "in 46 GiB (49.39 GB)" in out
    for name, system in SYSTEMS.items():
        total = peak(stage_memory(TRAINING, system)).total / 1e9
        line = next(x for x in out.splitlines() if x.startswith(SYSTEM_NAMES[name]))
        assert f"{total:.2f}" in line
    assert "stage 4" in out and " 16 " in out  # bits of the whole budget
    assert all(x == x.rstrip() for x in out.splitlines())


def test_memory_as_json(capsys):
    status, out, _ = command(capsys, "memory", *RUN, "--gpu", "80", "--reserve", "0", "--json")
    report = json.loads(out)
    assert status == 0 and report["capacity_bytes"] == 80 * 2**30 and set(report["systems"]) == set(SYSTEMS)
    for found in report["systems"].values():
        assert found["fits"] == (found["peak_bytes"] <= report["capacity_bytes"])
        assert found["peak_bytes"] == max(s["total_bytes"] for s in found["stages"])
        assert found["longest_sequence"] >= 32 * 1024
    shared, plain = (report["systems"][n]["longest_sequence"] for n in ("shared", "bf16"))
    assert shared > 3 * plain
    without = json.loads(command(capsys, "memory", *RUN, "--json")[1])
    assert without["capacity_bytes"] is None and "fits" not in without["systems"]["bf16"]


def test_what_does_not_fit_says_so(capsys):
    _, out, _ = command(capsys, "memory", "--model", "codellama-34b", "--seq", "128k", "--tp", "8", "--gpu", "t4")
    line = next(x for x in out.splitlines() if x.startswith("mixed precision") and "none" in x)
    assert line.split()[-4:] == ["no", "none", "fits", "none"]


def test_memory_writes_a_page(capsys, tmp_path):
    page = tmp_path / "memory.html"
    status, _, _ = command(capsys, "memory", *RUN, "--figure", str(page))
    assert status == 0 and "Memory of the fullest device" in page.read_text()


def test_bits_of_stages(capsys):
    status, out, _ = command(capsys, "bits", *RUN, "--chunks", "2")
    assert status == 0 and "11, 9, 7, 5" in out
    rows = {x.split()[0]: x for x in out.splitlines() if x}
    assert rows["budget"].endswith("+0.0%") and not rows["paper"].endswith("+0.0%")  # logits: the last stage's room
    report = json.loads(command(capsys, "bits", *RUN, "--layout", "paper", "--json")[1])
    assert report["rules"]["paper"]["layers"][::8] == [4, 5, 8, 8] and report["layout"] == "paper"


def test_paper_tables(capsys):
    status, out, _ = command(capsys, "paper")
    assert (
        status == 0 and "21 of 21 numbers counted as printed" in out and "(1 + 0.369 recomputed / 10) / 1.0237" in out
    )
    report = json.loads(command(capsys, "paper", "--json")[1])
    assert [len(report[k]) for k in ("table 1", "table 2", "tables 8 and 14", "saved")] == [21, 7, 12, 10]
    assert all("error" in row for key in ("table 2", "tables 8 and 14", "saved") for row in report[key])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["memory", "--model", "llama3-8b", "--seq", "8k", "--tp", "3"], "does not divide 32 heads"),
        (["memory", "--model", "llama3-8b", "--seq", "8k", "--pp", "5"], "5 stages"),
        (["memory", "--model", "llama3-8b", "--seq", "8k", "--layers", "0"], "n_layers is 0"),
        (["memory", "--model", "llama3-8b", "--seq", "8k", "--gpu", "16", "--reserve", "16"], "--reserve 16"),
        (
            ["bits", "--model", "llama3-8b", "--seq", "8k", "--pp", "4", "--chunks", "2", "--micro-batches", "6"],
            "multiple",
        ),
    ],
)
def test_errors_go_to_standard_error(capsys, args, message):
    status, out, err = command(capsys, *args)
    assert status == 2 and out == "" and err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seq", "32x"], "such as 8192, 32k"),
        (["--seq", "0"], "no number of tokens"),
        (["--seq", "8k", "--gpu", "abacus"], "give GiB, or one of t4"),
        (["--seq", "8k", "--gpu", "-3"], "give GiB"),
    ],
)
def test_arguments_say_what_is_allowed(capsys, args, message):
    with pytest.raises(SystemExit):
        main(["memory", "--model", "llama3-8b", *args])
    assert message in capsys.readouterr().err


def test_every_gpu_is_accepted_and_names_are_unique():
    assert len(GPUS) == len(set(GPUS)) and all(16 <= size <= 192 for size in GPUS.values())
    assert table(("a", "b"), [("x", "10"), ("yy", "2")]) == "a    b\n--  --\nx   10\nyy   2"


# ---- figures ------------------------------------------------------------------------------------------------------


def test_layer_figure_adds_up_to_the_layers():
    fig = layer_figure(("llama2-13b", "llama3-8b"), (8192, 32_768), (1, 8))
    config = get_config("llama3-8b")
    bars = shown(fig, model="llama3-8b", seq="32K", tensor=8)
    assert len(bars) == 6
    for layout in ("bf16", "coat", "paper", "shared"):
        total = sum(t.x[t.y.index(LAYOUT_NAMES[layout])] for t in bars)
        unit = 2 * 32_768 * config.d_model * config.n_layers / 8
        assert total == pytest.approx(float(layer_units(layout, LayerShape.of(config), scale_bits=0.25)) * unit / 1e9)
    assert [c["key"] for c in fig.layout.meta["controls"]] == ["model", "seq", "tensor"]


def test_device_figure_shows_every_system_and_the_gpu():
    fig = device_figure(TRAINING, capacity=80 * 2**30)
    bars = [t for t in fig.data if t.type == "bar"]
    assert [t.name for t in bars] == list(KINDS)
    for index, system in enumerate(SYSTEMS.values()):
        assert sum(t.x[index] for t in bars) == pytest.approx(peak(stage_memory(TRAINING, system)).total / 1e9)
    assert fig.data[-1].x == (80 * 2**30 / 1e9,) * 2
    assert len(device_figure(TRAINING).data) == len(bars)


def test_stages_figure_shows_bits_and_what_is_in_flight():
    fig = stages_figure(TRAINING, layout="paper")
    (text,) = [t for t in shown(fig, rule="the paper's", chunks=2) if t.type == "scatter" and t.mode == "text"]
    assert text.text == ("11 in flight, 4 bits", "9 in flight, 5 bits", "7 in flight, 6 bits", "5 in flight, 8 bits")
    for rule in ("4 bits everywhere", "whole budget"):
        found = shown(fig, rule=rule, chunks=1)
        bars, (limit,) = (
            [t for t in found if t.type == "bar"],
            [t for t in found if t.type == "scatter" and t.mode == "lines"],
        )
        totals = [sum(t.y[s] for t in bars) for s in range(4)]
        assert max(totals) == pytest.approx(limit.y[0], abs=1e-6)
    with pytest.raises(ValueError, match="encodes nothing"):
        stages_figure(TRAINING, layout="coat")
    assert [c["key"] for c in stages_figure(TRAINING, chunks=(1,)).layout.meta["controls"]] == ["rule"]


def test_figures_of_the_papers_tables():
    fig = published_figure()
    assert [len(t.x) for t in fig.data] == [12, 12, 12] and fig.data[0].x[0] == 46.1
    speed = speed_figure()
    assert [len(t.y) for t in speed.data] == [7, 7, 7]
    assert speed.data[1].y[-1] == pytest.approx(1.337, abs=0.001)
    assert "1.34" in speed.layout.meta["alt"]


def test_statistics_are_small():
    config = get_config("llama3-8b")
    unit = 2 * config.d_model
    assert statistics_bytes(config, 1) / unit == pytest.approx(0.0166, abs=0.0001)
    with pytest.raises(ValueError, match="at least 1"):
        statistics_bytes(config, 0)
