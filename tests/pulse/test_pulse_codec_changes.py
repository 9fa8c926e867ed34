"""Changes of a segment: found 64 at a time, on a device, and kept in memory that the caller gives."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_lib.pulse import codecs, patch
from dist_lib.pulse.codecs import CODECS, Place, decode_segment, encode_change, encode_segment, find_changes
from dist_lib.pulse.state import TensorSpec, as_words, in_threads


def words(cells: int, dtype: str, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, cells, dtype, endpoint=True)
    return old, np.where(rng.random(cells) < share, old ^ rng.integers(1, 100, cells).astype(dtype), old)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("cells", [1, 63, 64, 65, 1000])
def test_changes_are_those_of_a_comparison(cells: int, dtype: str) -> None:
    for share in (0.0, 0.02, 1.0):
        old, new = words(cells, dtype, share)
        change = find_changes(old, new)
        expected = np.flatnonzero(old != new)
        assert change.cells == cells and np.array_equal(change.positions, expected)
        assert np.array_equal(change.before, old[expected]) and np.array_equal(change.after, new[expected])


def test_changes_of_cells_that_are_not_contiguous() -> None:
    old, new = words(4000, "u2", 0.1)
    assert np.array_equal(find_changes(old[::3], new[::3]).positions, np.flatnonzero(old[::3] != new[::3]))


@pytest.mark.parametrize("codec", list(CODECS))
def test_changes_found_where_a_tensor_lies_give_the_same_bytes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (patch.fileformat, codecs):
        monkeypatch.setattr(module, "SEGMENT", 1000)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(70, 51, generator=generator) * 0.02
    old, new = master.bfloat16(), (master + 1e-4 * torch.randn(70, 51, generator=generator)).bfloat16()
    new.view(-1)[1000:2000] = old.view(-1)[1000:2000]  # a segment without changes
    spec = TensorSpec(torch.bfloat16, (70, 51))
    a, b = as_words(old), as_words(new)
    found = patch.device_changes(old, new, spec)
    assert len(found) == 4 and found[1].positions.size == 0
    for start, change in zip(range(0, 3570, 1000), found, strict=True):
        here, place = slice(start, start + 1000), Place(spec, start)
        base = a[here] if CODECS[codec].needs_base else None
        assert encode_change(CODECS[codec], base, change, place) == encode_segment(
            CODECS[codec], a[here], b[here], place
        )
    if CODECS[codec].needs_base:
        with pytest.raises(ValueError, match="needs the words of the base"):
            encode_change(CODECS[codec], None, found[0], Place(spec, 0))


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("cells", [255, 256, 257, 513, 5000])
def test_segments_decode_into_given_memory(codec: str, cells: int) -> None:
    """Around the size of a block, at several densities; the base stays as it was."""
    for share in (0.001, 0.03, 0.6, 1.0):
        old, new = words(cells, "u2", share, seed=cells)
        place = Place(TensorSpec(torch.bfloat16, (cells,)), 0)
        data = encode_segment(CODECS[codec], old, new, place)
        kept, out = old.copy(), np.full(cells, 7, np.uint16)
        assert decode_segment(CODECS[codec], memoryview(data), old, place, out) is out
        assert np.array_equal(out, new) and np.array_equal(old, kept)


def test_small_follows_the_exponent() -> None:
    """Where only small cells change, their positions cost less than a mask that knows nothing could."""
    rng = np.random.default_rng(0)
    old = torch.from_numpy(rng.normal(0, 0.02, 1 << 17)).bfloat16()
    words_old = as_words(old)
    order = (words_old >> 7) & 255
    new = words_old.copy()
    small = np.flatnonzero(order <= np.quantile(order, 0.02))
    new[small] += 1
    density = small.size / new.size
    entropy = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) * new.size / 8
    place = Place(TensorSpec(torch.bfloat16, (1 << 17,)), 0)
    assert len(encode_segment(CODECS["small"], words_old, new, place)) < 0.3 * entropy


def test_threads_keep_order_and_raise_the_first_error() -> None:
    assert in_threads(lambda i: i * i, range(100), 2) == [i * i for i in range(100)]
    seen = []

    def fails(i: int) -> int:
        seen.append(i)
        if i >= 5:
            raise ValueError(f"item {i}")
        return i

    with pytest.raises(ValueError, match="item 5"):
        in_threads(fails, range(1000), 2)
    assert len(seen) < 20


def test_room_for_changes_grows_where_many_cells_change() -> None:
    for share in (1 / 16, 0.08, 0.5):
        old, new = words(100_001, "u2", share)
        assert np.array_equal(find_changes(old, new).positions, np.flatnonzero(old != new))


def test_differences_that_follow_from_the_exponent_cost_next_to_nothing() -> None:
    """One table for all where differences are distributed alike, one for each group of exponents where they are not."""
    rng = np.random.default_rng(0)
    old = as_words(torch.from_numpy(rng.normal(0, 0.02, 1 << 17)).bfloat16())
    where = rng.choice(old.size, 6000, replace=False)
    place, sizes = Place(TensorSpec(torch.bfloat16, (1 << 17,)), 0), []
    for steps in (rng.integers(1, 9, where.size), 1 + (((old[where] >> 7) & 255) % 8)):
        new = old.copy()
        new[where] += steps.astype(np.uint16)
        data = encode_segment(CODECS["small"], old, new, place)
        assert np.array_equal(decode_segment(CODECS["small"], memoryview(data), old, place), new)
        sizes.append(len(data))
    assert sizes[0] - sizes[1] > 0.8 * 3 * where.size / 8  # three bits a cell


def test_kept_code_is_current_only_while_all_compiled_files_are(tmp_path: Path) -> None:
    """A changed file compiles what calls its functions anew, although their own files did not change."""
    for name in ("_kernels.py", "_vector.py"):
        text = Path(codecs.__file__).with_name(name).read_text()
        (tmp_path / name).write_text(text.replace("dist_lib.pulse._vector", "_vector"))
    (tmp_path / "_user.py").write_text(
        "from _kernels import compiled\nfrom _plan import value\n@compiled\ndef twice():\n    return 2 * value()\n"
    )
    found = []
    for number in (1, 1, 3):
        (tmp_path / "_plan.py").write_text(
            f"from _kernels import compiled\n@compiled\ndef value():\n    return {number}\n"
        )
        code = "import _user; print(_user.twice(), sum(_user.twice.stats.cache_hits.values()))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert found == [["2", "0"], ["2", "1"], ["6", "0"]]
