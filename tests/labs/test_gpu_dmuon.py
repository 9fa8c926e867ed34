"""The GPU check of owner-sharded Muon, run on the CPU in a group of one: it passes, and planted faults are found."""

import subprocess
import sys

import pytest
import torch

from dist_lib.comm import distributed
from dist_lib.dmuon import DMuonDDP
from dist_lib.dmuon.fsdp import DMuonFSDP
from dist_lib.dmuon.optimizer import OwnedMuon
from dist_lib.dmuon.reduction import GradientPass
from labs.gpu import dmuon
from labs.gpu.dmuon import MODES, SMALL, check_overlap, check_path, check_update, random_batches, run_paths
from labs.gpu_check import CHECK_MODULES, GpuReport


@pytest.fixture
def report():
    return GpuReport(say=lambda line: None)


@pytest.fixture
def group():
    with distributed(device="cpu") as context:
        yield context


def failures(report):
    return [entry.name for entry in report.entries if entry.ok is False]


def test_every_mode_has_the_bits_of_a_single_process(report):
    run_paths(report, "cpu", (SMALL,))
    assert failures(report) == []
    equal = [e for e in report.entries if e.name.endswith("single-process Muon")]
    assert [e.name.split(",")[0] for e in equal] == list(MODES)
    assert all(e.values["equal"] == 30 and e.values["share"] == 0 for e in equal)
    assert "gloo" in report.entries[0].text


def test_a_mode_that_is_missing_is_named(report, monkeypatch):
    def without(mode, *rest):
        raise ImportError("no fully_shard")

    monkeypatch.setattr(dmuon, "make_runtime", without)
    monkeypatch.setattr(dmuon, "check_overlap", lambda *rest: None)
    run_paths(report, "cpu", (SMALL,))
    assert [e.name for e in report.entries if "left out: no fully_shard" in e.text] == list(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_gradient_is_found(report, group, monkeypatch, mode):
    reduce_pack = GradientPass._reduce_pack

    def forgetful(self, layer, pack):
        for name in pack.names:
            if name == "layers.1.self_attn.q_proj.weight":
                self.parameters[name].grad[0].zero_()
        reduce_pack(self, layer, pack)

    monkeypatch.setattr(GradientPass, "_reduce_pack", forgetful)
    check_path(report, "cpu", mode)
    assert failures(report) == [f"{mode}, d = 64: one rank equals single-process Muon"]


def test_a_matrix_that_is_orthogonalised_twice_is_found(report, group, monkeypatch):
    update = OwnedMuon._update

    def twice(self, batch, options):
        update(self, batch, options)
        self.histogram[self._names[id(batch[0].p)]] += 1

    monkeypatch.setattr(OwnedMuon, "_update", twice)
    check_path(report, "cpu", "ddp")
    assert failures(report) == ["ddp, d = 64: every matrix orthogonalised once a step"]


def test_weights_that_travel_twice_are_found(report, group, monkeypatch):
    after = DMuonFSDP._after_forward

    def freed(self, layer):
        after(self, layer)
        self._free(layer)

    monkeypatch.setattr(DMuonFSDP, "_after_forward", freed)
    check_path(report, "cpu", "fsdp-keep", steps=2)
    assert failures(report) == ["fsdp-keep, d = 64: bytes of a step"]


def test_a_publication_that_waits_at_once_is_no_overlap(report, group, monkeypatch):
    publish = DMuonDDP.publish

    def waiting(self):
        publish(self)
        self.drain()

    monkeypatch.setattr(DMuonDDP, "publish", waiting)
    check_overlap(report, "cpu")
    assert failures(report) == ["async publication overlaps forward", "no layer runs before its weights"]


def test_a_reduction_after_backward_is_no_overlap(report, group, monkeypatch):
    monkeypatch.setattr(GradientPass, "_advance", lambda self: None)
    check_overlap(report, "cpu")
    assert failures(report) == ["reduction overlaps backward"]


def test_the_trace_goes_into_the_report(report, group):
    check_overlap(report, "cpu")
    trace = report.entries[-1].values["trace"]
    kinds = {kind for kind, *_ in trace}
    assert kinds >= {"publish", "wait", "forward", "backward", "reduce", "orthogonalise", "adamw"}
    assert all(0 <= start <= end for *_, start, end in trace)


def test_both_ways_make_the_same_step(report):
    ours, usual = check_update(report, "cpu", SMALL)
    assert failures(report) == [] and ours.orthogonalised == len(usual.parameters) == 7


def test_a_direct_form_that_stops_early_is_found(report, monkeypatch):
    whole = dmuon.fused_direct
    monkeypatch.setattr(dmuon, "fused_direct", lambda x, triples, dtype: whole(x, triples[:3], dtype))
    check_update(report, "cpu", SMALL)
    assert len(failures(report)) == 1


def test_batches_are_drawn_anew():
    first, second = (random_batches(SMALL, 1, "cpu") for _ in range(2))
    assert first[0][0].shape == (4, 32) and not torch.equal(first[0][0], second[0][0])


def test_it_is_registered_and_needs_little():
    assert "labs.gpu.dmuon" in CHECK_MODULES
    heavy = "('scipy', 'numba', 'rich', 'typer', 'plotly', 'zstandard', 'bitsandbytes')"
    code = f"import sys, labs.gpu.dmuon; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
