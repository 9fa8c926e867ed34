"""GPU checks of weight sync: the changed cells of two tensors, found on the device, and one sync from end to end.

Mask, counts and indices must equal those that plain torch operations give on a CPU, for odd lengths, for none and for
all cells changed, for zeros of both signs and NaN, and past 2^31 cells. Times stand beside the copy that this run
measured and beside torch's own comparison and search. Last, states on the device are published into a folder and
followed there: what arrives must be equal in every bit. That part needs the packages of ``dist-lib[pulse]``.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time

import torch
from torch import Tensor

from dist_lib.ops import bit_changes
from dist_lib.ops.bit_diff import compact_bits, diff_bits
from labs.gpu_check import GpuReport

LENGTHS = (1, 33, 4096, 100_003)
SHARES = (0.0, 0.01, 1.0)
TIMED_CELLS = 2**30
TIMED_SHARE = 0.01
ROW_SECONDS = 20.0  # the row is started only if this much time is left
PACKAGES = ("numba", "zstandard", "fsspec")


def make_pair(cells: int, share: float, device: str) -> tuple[Tensor, Tensor]:
    """Random bits, int16, and the same with a share of its cells changed."""
    old = torch.empty(cells, dtype=torch.int16, device=device).random_(-(2**15), 2**15)
    new = old.clone()
    for start in range(0, cells, 2**26):  # piece by piece: the random numbers take twice the memory of the cells
        piece = new[start : start + 2**26]
        piece ^= (torch.rand(piece.shape, device=device, dtype=torch.float32) < share).to(torch.int16)
    return old, new


def same_changes(old: Tensor, new: Tensor) -> bool:
    """Whether mask, counts and indices of two int16 tensors equal the CPU's."""
    theirs = diff_bits(old.cpu(), new.cpu())
    ours = diff_bits(old, new)
    found = int(theirs[1].sum())
    good = all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
    return good and torch.equal(compact_bits(*ours, found).cpu(), compact_bits(*theirs, found))


def check_changes(report: GpuReport, device: str) -> None:
    """Lengths and shares of changed cells, then bits that compare otherwise as values."""
    for share in SHARES:
        good = all(same_changes(*make_pair(cells, share, device)) for cells in LENGTHS)
        report.check(f"{share:.0%} changed: mask, counts and indices equal the CPU's", good)
    old = torch.tensor([0.0, float("nan"), float("nan"), -0.0] * 1025, dtype=torch.bfloat16, device=device)
    new = old.clone()
    new[0], new[4099] = -0.0, 0.0
    new.view(torch.int16)[6] ^= 1
    report.check("signs of zeros and payloads of NaN are bits", bit_changes(old, new).tolist() == [0, 6, 4099])


def check_offsets(report: GpuReport) -> None:
    """Past 2^31 cells: changes at both ends and around the border."""
    cells = 2**31 + 2**20 + 5
    if torch.cuda.mem_get_info()[0] < 6 * cells:
        report.add("2^31 cells", "left out: this GPU has too little memory for it")
        return
    old = torch.empty(cells, dtype=torch.int16, device="cuda").random_(-(2**15), 2**15)
    new = old.clone()
    where = [0, 2**31 - 1, 2**31, 2**31 + 4097, cells - 1]
    new[where] ^= 1
    report.check("past 2^31 cells: indices are right", bit_changes(old, new).tolist() == where)


def time_changes(report: GpuReport, cells: int = TIMED_CELLS) -> None:
    """Mask and ordered indices at one change in a hundred, beside torch's comparison and search."""
    if report.seconds_left() < ROW_SECONDS:
        report.add("times", "left out: no time")
        return
    old, new = make_pair(cells, TIMED_SHARE, "cuda")
    mask, counts = diff_bits(old, new)
    found = int(counts.sum(dtype=torch.int64))
    bits = cells // 8
    diff = report.time(lambda: diff_bits(old, new))
    report.row(f"diff of {cells} cells to a bit mask", diff, nbytes=4 * cells + bits)
    compact = report.time(lambda: compact_bits(mask, counts, found))
    report.row(f"ordered indices of {found} changes", compact, nbytes=bits + 8 * found)

    def both() -> Tensor:
        positions: Tensor = compact_bits(*diff_bits(old, new), found)
        return positions

    baseline = report.time(lambda: (old != new).nonzero(), samples=5)
    report.row(
        "both, against torch's comparison and search",
        report.time(both),
        baseline,
        nbytes=4 * cells + 2 * bits + 8 * found,
    )


def sync_once(device: str, cells: int, codec: str) -> tuple[bool, dict[str, float]]:
    """Publish two versions of a state on a device and follow them: whether all bits arrived, and seconds."""
    from dist_lib.pulse import Publisher, Store, Subscriber

    width = 4096
    master = torch.randn(cells // width, width, device=device) * 0.02
    old = {"weight": master.bfloat16(), "bias": torch.zeros(7, device=device)}
    new = {"weight": (master + 3e-6 * torch.randn_like(master)).bfloat16(), "bias": old["bias"] - 0.0}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="dist_lib_sync_") as folder:
        publisher, subscriber = Publisher(Store(folder), codec=codec), Subscriber(Store(folder))
        publisher.publish(old)
        subscriber.poll()
        begin = time.perf_counter()
        publisher.publish(new)
        seconds["publish_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        subscriber.poll()
        seconds["follow_s"] = time.perf_counter() - begin
    state = {name: tensor.to(device) for name, tensor in (subscriber.state or {}).items()}
    good = set(state) == set(new) and all(
        torch.equal(state[name].reshape(-1).view(torch.uint8), new[name].reshape(-1).view(torch.uint8)) for name in new
    )
    return good, seconds


def check_sync(report: GpuReport, device: str, cells: int = 2**26) -> None:
    """A sync of one codec that needs the changes only, and of one that needs the base as well."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        report.add("sync", f"left out: {', '.join(missing)} not installed (pip install 'dist-lib[pulse]')")
        return
    for codec in ("fast", "small"):
        good, seconds = sync_once(device, cells, codec)
        text = ", ".join(f"{key.removesuffix('_s')} {value * 1e3:.0f} ms" for key, value in seconds.items())
        report.check(f"sync of {cells} cells, codec {codec}: equal in every bit", good, text, **seconds)


def run(report: GpuReport) -> None:
    """All checks of this module, on the current GPU."""
    torch.manual_seed(0)
    check_changes(report, "cuda")
    check_offsets(report)
    time_changes(report)
    torch.cuda.empty_cache()
    check_sync(report, "cuda")
