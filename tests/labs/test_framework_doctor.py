"""doctor: every probe answers, a broken one stops no other, and scales that cannot run here are named."""

import platform

import pytest
from rich.console import Console

from labs import doctor
from labs.doctor import Finding, why_not
from labs.framework import RunSettings

MEANS = {"gpus": 0, "gpu_gib": 0.0, "ram_gib": 8.0, "disk_mib": 1000.0}


def test_a_healthy_machine_passes_and_is_not_named(capsys):
    console = Console(record=True, width=160)
    works = doctor.examine(console)
    text = console.export_text()
    assert works, text
    assert all(name in text for name, _ in doctor.PROBES)
    assert "GB/s" in text and "latency" in text
    assert platform.node() in ("", "localhost") or platform.node() not in text


def test_a_broken_probe_is_a_bad_finding_and_the_others_go_on(monkeypatch):
    def broken():
        raise OSError("planted")

    monkeypatch.setattr(doctor, "PROBES", (("first", broken), ("second", lambda: Finding("second", "ok", "fine"))))
    first, second = doctor.findings()
    assert (first.level, second.level) == ("bad", "ok") and "planted" in first.text
    assert doctor.examine(Console(quiet=True)) is False


@pytest.mark.parametrize(
    ("run", "means", "words"),
    [
        (RunSettings(device="cuda"), {}, "needs a CUDA device"),
        (RunSettings(device="cuda", world_size=8), {"gpus": 2, "gpu_gib": 80.0}, "needs 8 GPUs"),
        (RunSettings(device="cuda", memory_gib=40), {"gpus": 1, "gpu_gib": 24.0}, "40 GiB on each GPU"),
        (RunSettings(memory_gib=16), {}, "16 GiB of memory"),
        (RunSettings(disk_mib=5000), {}, "5000 MiB of disk"),
        (RunSettings(world_size=4), {}, ""),
        (RunSettings(device="cuda", memory_gib=40), {"gpus": 1, "gpu_gib": 80.0}, ""),
    ],
)
def test_why_a_scale_would_not_run(run, means, words):
    reason = why_not(run, **{**MEANS, **means})
    assert (words in reason) if words else reason == ""


def test_two_processes_time_their_link():
    from dist_lib.comm import launch

    times = launch(doctor.time_all_reduce, world_size=2, args=(2**20,))
    assert all(large > 0 and small > 0 for large, small in times)


def test_a_machine_whose_processes_cannot_talk_is_bad(monkeypatch):
    def refuse(*args, **kwargs):
        raise doctor.LaunchError("connection refused")

    monkeypatch.setattr(doctor, "launch", refuse)
    finding = doctor._gloo()
    assert finding.level == "bad" and "connection refused" in finding.text
