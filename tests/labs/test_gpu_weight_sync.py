"""The GPU checks of weight sync as far as a CPU can run them: they pass on the reference, and can fail."""

import pytest
import torch

from dist_lib.pulse import patch
from labs.gpu import weight_sync as checks
from labs.gpu_check import CHECK_MODULES, GpuReport


def _report():
    return GpuReport(say=lambda _: None)


def test_the_checks_pass_where_both_sides_are_the_reference():
    report = _report()
    checks.check_changes(report, "cpu")
    checks.check_sync(report, "cpu", 2**16)
    assert not report.failed and len(report.entries) == 3 + 1 + 2
    assert "labs.gpu.weight_sync" in CHECK_MODULES


def test_pairs_differ_in_the_share_that_is_asked_for():
    for share in checks.SHARES:
        old, new = checks.make_pair(20_000, share, "cpu")
        assert float((old != new).float().mean()) == pytest.approx(share, abs=0.004)


def test_a_lost_change_is_seen(monkeypatch):
    compact = checks.compact_bits
    monkeypatch.setattr(checks, "compact_bits", lambda mask, counts, found: compact(mask, counts, found)[1:])
    assert checks.same_changes(*checks.make_pair(100, 1.0, "cpu"))  # lost on both sides alike
    calls = []

    def once(mask, counts, found):
        calls.append(found)
        return compact(mask, counts, found)[1 if len(calls) == 1 else 0 :]

    monkeypatch.setattr(checks, "compact_bits", once)
    assert not checks.same_changes(*checks.make_pair(100, 1.0, "cpu"))


def test_a_sync_that_loses_a_bit_is_seen(monkeypatch):
    from dist_lib.pulse.subscriber import Subscriber

    poll = Subscriber.poll

    def flipped(self, **options):
        update = poll(self, **options)
        if update is not None and update.version == 1:
            self.state["weight"].view(torch.int16)[0, 0] ^= 1
        return update

    monkeypatch.setattr(Subscriber, "poll", flipped)
    report = _report()
    checks.check_sync(report, "cpu", 2**14)
    assert report.failed


def test_without_the_packages_the_sync_is_left_out_and_says_so(monkeypatch):
    monkeypatch.setattr(checks, "PACKAGES", ("no_such_package",))
    report = _report()
    checks.check_sync(report, "cpu")
    assert not report.failed and "no_such_package" in report.entries[0].text


def test_changes_on_a_device_take_the_operation(monkeypatch):
    """The encoder asks the operation for the changes of tensors of one CUDA device, and it alone."""
    spec = patch.spec_of("w", torch.zeros(8, dtype=torch.bfloat16))
    old = torch.zeros(8, dtype=torch.bfloat16)
    new = old.clone()
    new[3] = 1.0
    (change,) = patch.device_changes(old, new, spec)
    assert change.positions.tolist() == [3] and change.after.tolist() == [0x3F80] and change.before.tolist() == [0]
