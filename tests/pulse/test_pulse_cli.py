"""The commands on real safetensors checkpoints in hub folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_lib.pulse.__main__ import main, parser
from dist_lib.pulse.checkpoints import load_checkpoint, save_checkpoint
from dist_lib.pulse.errors import StateError
from dist_lib.pulse.state import digest_state


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two hub folders: weights in two files, a configuration beside them."""
    w = torch.randn(30, 20).bfloat16()
    for name, bump in (("old", 0), ("new", 1)):
        folder = tmp_path / name
        folder.mkdir()
        changed = w.clone()
        changed.view(torch.int16)[3:5] += bump
        save_file({"a": changed, "n": torch.ones(4)}, folder / "model-00001-of-00002.safetensors")
        save_file({"b": torch.arange(5)}, folder / "model-00002-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text("{}")
        (folder / "config.json").write_text(json.dumps({"name": name}))
    return tmp_path / "old", tmp_path / "new"


@pytest.mark.parametrize("codec", ["paper", "fast", "small"])
def test_diff_apply_inspect_verify(folders: tuple[Path, Path], codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = folders
    patch, out = old.parent / "p.pulse", old.parent / "out"
    assert main(["--quiet", "diff", str(old), str(new), "-o", str(patch), "--codec", codec, "--base-version", "6"]) == 0
    assert "times smaller" in capsys.readouterr().out
    assert main(["inspect", str(patch), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "40 of 609 cells" in text and f"codec     {codec}" in text and "version   7" in text
    for folder, word in ((old, "the base"), (new, "the result")):
        assert main(["verify", str(folder), str(patch)]) == 0
        assert word in capsys.readouterr().out
    assert main(["apply", str(old), str(patch), "-o", str(out)]) == 0
    assert digest_state(load_checkpoint(out)).whole == digest_state(load_checkpoint(new)).whole
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert main(["apply", str(old), str(patch), "-o", str(out)]) == 0  # over the old one
    assert not [p for p in old.parent.iterdir() if p.name.startswith(".")]


def test_exit_codes_tell_stale_from_corrupt(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    old, new = folders
    patch, out = old.parent / "p.pulse", old.parent / "out.safetensors"
    main(["--quiet", "diff", str(old), str(new), "-o", str(patch)])
    assert main(["apply", str(new), str(patch), "-o", str(out)]) == 3
    data = bytearray(patch.read_bytes())
    data[-1] ^= 1
    patch.write_bytes(data)
    assert main(["apply", str(old), str(patch), "-o", str(out)]) == 4
    assert main(["inspect", str(patch)]) == 4
    assert main(["apply", str(old / "nothing"), str(patch), "-o", str(out)]) == 1
    assert "give a .safetensors file" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(SystemExit) as stop:
        main(["diff", str(old)])
    assert stop.value.code == 2


def test_publish_and_follow_signed(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    old, new = folders
    root = old.parent
    store, out, key = str(root / "store"), root / "live.safetensors", root / "key"
    assert main(["keygen", str(key)]) == 0 and key.stat().st_mode & 0o77 == 0
    assert main(["keygen", str(key)]) == 1  # never over a key that is there
    follow = ["follow", store, "-o", str(out), "--once", "--public-key", f"{key}.pub"]
    assert main(follow) == 1
    assert "nothing is published" in capsys.readouterr().err
    assert main(["publish", store, str(old), "--key", str(key)]) == 0
    assert main(follow) == 0
    assert digest_state(load_file(out)).whole == digest_state(load_checkpoint(old)).whole
    assert main(["publish", store, str(new), str(old), "--key", str(key)]) == 0
    assert main(follow) == 0
    assert "version 2 (anchor 0, patch 1, patch 2)" in capsys.readouterr().out
    assert main(["publish", store, str(new)]) == 0  # unsigned
    before = out.read_bytes()
    assert main(follow) == 0 and out.read_bytes() == before  # stays at version 2
    (root / "key.pub").write_text("no key")
    assert main(follow) == 1


def test_checkpoints_are_checked(folders: tuple[Path, Path]) -> None:
    old, _ = folders
    save_file({"a": torch.zeros(1)}, old / "model-00003.safetensors")
    with pytest.raises(StateError, match="several files"):
        load_checkpoint(old)
    (old / "model-00003.safetensors").write_bytes(b"junk")
    with pytest.raises(StateError, match="cannot be read"):
        load_checkpoint(old)
    w = torch.randn(3, 2)
    save_checkpoint({"x": w, "y": w, "t": w.t()}, old.parent / "tied.safetensors")
    read = load_file(old.parent / "tied.safetensors")
    assert torch.equal(read["x"], w) and torch.equal(read["y"], w) and torch.equal(read["t"], w.t())


def test_every_command_answers_help(capsys: pytest.CaptureFixture[str]) -> None:
    actions = [a for a in parser()._actions if a.dest == "command"]
    for name in actions[0].choices or ():
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0 and len(capsys.readouterr().out) > 100
