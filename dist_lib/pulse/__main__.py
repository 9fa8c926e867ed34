"""Commands on safetensors checkpoints: ``python -m dist_lib.pulse {diff,apply,inspect,verify,publish,follow,keygen}``.

Results go to standard output, progress to standard error. Exit codes: 0 done, 1 it cannot be done (the message says
why and what to do), 2 a wrong command line, 3 a stale base, 4 a corrupt patch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dist_lib.pulse.checkpoints import load_checkpoint, save_checkpoint
from dist_lib.pulse.codecs import CODECS
from dist_lib.pulse.errors import CorruptPatchError, PulseError, StaleBaseError
from dist_lib.pulse.format import Patch
from dist_lib.pulse.manifest import load_key, public_bytes
from dist_lib.pulse.patch import apply, changed_cells, decode, diff, encode
from dist_lib.pulse.publisher import Publisher, Retention
from dist_lib.pulse.state import digest_state
from dist_lib.pulse.store import Store
from dist_lib.pulse.subscriber import Subscriber

logger = logging.getLogger("dist_lib.pulse")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f} MB" if nbytes >= 1_000_000 else f"{nbytes} B"


class _Step:
    """Says what is going on, and how long it took."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        self.start = time.monotonic()
        logger.info("%s ...", self.what)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            logger.info("%s: %.2f s", self.what, time.monotonic() - self.start)


def _diff(args: argparse.Namespace) -> int:
    with _Step(f"reading {args.base} and {args.new}"):
        base, new = load_checkpoint(args.base), load_checkpoint(args.new)
    with _Step("comparing bits"):
        made = diff(base, new, base_version=args.base_version)
    with _Step(f"coding ({args.codec})"):
        data = encode(made, args.codec)
    beside = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    beside.write_bytes(data)
    os.replace(beside, args.out)
    full = sum(t.nbytes for t in new.values())
    _say(f"{args.out}: {_size(len(data))}, {full / max(1, len(data)):.1f} times smaller than {_size(full)}")
    return 0


def _apply(args: argparse.Namespace) -> int:
    with _Step(f"reading {args.base} and {args.patch}"):
        base, patch = load_checkpoint(args.base), decode(args.patch.read_bytes())
    with _Step("applying and verifying"):
        result = apply(patch, base)
    with _Step(f"writing {args.out}"):
        save_checkpoint(result, args.out, like=args.base)
    _say(f"{args.out}: version {patch.version}, digest {patch.digest.hex()}")
    return 0


def _describe(patch: Patch, nbytes: int) -> list[str]:
    changed, cells = changed_cells(patch), sum(e.spec.cells for e in patch.entries if e.kind != "alias")
    total = sum(changed.values())
    kinds = {kind: sum(e.kind == kind for e in patch.entries) for kind in ("same", "alias", "cells", "full")}
    base = "no base" if patch.base_digest is None else f"base {patch.base_version} {patch.base_digest.hex()}"
    return [
        f"version   {patch.version} {patch.digest.hex()}",
        f"base      {base}",
        f"codec     {patch.codec}",
        f"tensors   {len(patch.entries)}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
        f"changed   {total} of {cells} cells, {100 * total / max(1, cells):.4f} %",
        f"bytes     {nbytes}, {nbytes / max(1, total):.3f} a changed cell",
    ]


def _inspect(args: argparse.Namespace) -> int:
    data = args.patch.read_bytes()
    patch = decode(data)
    for line in _describe(patch, len(data)):
        _say(line)
    if args.tensors:
        changed = changed_cells(patch)
        for e in patch.entries:
            shape = "x".join(map(str, e.spec.shape)) or "scalar"
            dtype = str(e.spec.dtype).removeprefix("torch.")
            note = f" -> {e.alias}" if e.alias is not None else ""
            _say(f"{e.kind:6} {changed[e.name]:>12} {e.encoded_bytes:>12} B  {dtype:10} {shape:16} {e.name}{note}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    with _Step(f"reading {args.checkpoint}"):
        digest = digest_state(load_checkpoint(args.checkpoint))
    patch = decode(args.patch.read_bytes())
    if digest.whole == patch.digest:
        _say(f"{args.checkpoint} is version {patch.version}, the result of the patch")
        return 0
    if digest.whole == patch.base_digest:
        _say(f"{args.checkpoint} is version {patch.base_version}, the base of the patch")
        return 0
    told = patch.tensor_digests
    wrong = sorted(n for n in set(told) | set(digest.tensors) if told.get(n) != digest.tensors.get(n))
    _say(f"{args.checkpoint} is neither base nor result; {len(wrong)} tensors differ from the result: {wrong[:5]}")
    return 1


def _key_file(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text().strip())
    except ValueError as error:
        raise PulseError(f"{path} is not a key: 64 hexadecimal digits are expected") from error


def _publish(args: argparse.Namespace) -> int:
    key = load_key(_key_file(args.key)) if args.key else None
    retention = Retention(args.keep_anchors, args.min_age) if args.keep_anchors else None
    publisher = Publisher(
        Store(args.store), codec=args.codec, anchor_every=args.anchor_every, key=key, retention=retention
    )
    for checkpoint in args.checkpoints:
        with _Step(f"reading {checkpoint}"):
            state = load_checkpoint(checkpoint)
        with _Step(f"publishing to {args.store}"):
            done = publisher.publish(state)
        _say(f"version {done.version}: patch {_size(done.patch_bytes)}, anchor {_size(done.anchor_bytes)}")
    return 0


def _follow(args: argparse.Namespace) -> int:
    subscriber = Subscriber(Store(args.store), public_key=_key_file(args.public_key) if args.public_key else None)
    updates: Any = subscriber.follow(interval_s=args.interval)
    if args.once:
        first = subscriber.poll()
        updates = [] if first is None else [first]
    for update in updates:
        with _Step(f"writing {args.out}"):
            save_checkpoint(subscriber.state or {}, args.out, like=args.like)
        path = ", ".join(f"{kind} {version}" for kind, version in update.steps)
        _say(f"version {update.version} ({path}): {_size(update.nbytes)} in {update.seconds:.2f} s")
    if subscriber.version is None:
        raise PulseError(f"nothing is published in {args.store}")
    return 0


def _keygen(args: argparse.Namespace) -> int:
    secret = os.urandom(32)
    with os.fdopen(os.open(args.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.hex() + "\n")
    public = args.key.with_name(args.key.name + ".pub")
    public.write_text(public_bytes(load_key(secret)).hex() + "\n")
    _say(f"{args.key}: keep this secret; {public}: give this to receivers")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m dist_lib.pulse", description="Sparse, bit-exact weight sync.")
    top.add_argument("--quiet", action="store_true", help="no progress on standard error")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    codec: dict[str, Any] = {"choices": list(CODECS), "default": "small", "help": "how changes are coded (small)"}
    sub = command("diff", _diff, "write the patch from one checkpoint to another")
    sub.add_argument("base", type=Path, help="checkpoint that receivers hold: a .safetensors file or a hub folder")
    sub.add_argument("new", type=Path, help="checkpoint that they shall hold")
    sub.add_argument("-o", "--out", type=Path, required=True, help="patch file to write")
    sub.add_argument("--codec", **codec)
    sub.add_argument("--base-version", type=int, default=0, help="version of the base (0)")
    sub = command("apply", _apply, "apply a patch to a checkpoint, verify the result and write it")
    sub.add_argument("base", type=Path, help="checkpoint that the patch is for")
    sub.add_argument("patch", type=Path, help="patch file")
    sub.add_argument("-o", "--out", type=Path, required=True, help=".safetensors file or folder to write")
    sub = command("inspect", _inspect, "say what a patch holds")
    sub.add_argument("patch", type=Path, help="patch file")
    sub.add_argument("--tensors", action="store_true", help="one line for each tensor")
    sub = command("verify", _verify, "say whether a checkpoint is a patch's base, its result or neither")
    sub.add_argument("checkpoint", type=Path)
    sub.add_argument("patch", type=Path, help="patch file")
    sub = command("publish", _publish, "publish checkpoints as the next versions of a store")
    sub.add_argument("store", help="folder or URL, such as s3://bucket/run")
    sub.add_argument("checkpoints", type=Path, nargs="+", help="checkpoints in order")
    sub.add_argument("--codec", **codec)
    sub.add_argument("--anchor-every", type=int, default=30, help="versions from one anchor to the next (30)")
    sub.add_argument("--key", type=Path, help="private key to sign with, from keygen")
    sub.add_argument("--keep-anchors", type=int, default=0, help="anchors to keep, at least 2; 0 deletes nothing (0)")
    sub.add_argument("--min-age", type=float, default=3600.0, help="seconds for which everything is kept (3600)")
    sub = command("follow", _follow, "keep a checkpoint at the newest version of a store")
    sub.add_argument("store", help="folder or URL, also http(s)://")
    sub.add_argument("-o", "--out", type=Path, required=True, help=".safetensors file or folder to keep")
    sub.add_argument("--like", type=Path, help="hub folder whose configuration and tokenizer are copied along")
    sub.add_argument("--public-key", type=Path, help="accept only what this key has signed")
    sub.add_argument("--interval", type=float, default=5.0, help="seconds between looks (5)")
    sub.add_argument("--once", action="store_true", help="go to the newest version and end")
    sub = command("keygen", _keygen, "make a key pair")
    sub.add_argument("key", type=Path, help="file for the private key; the public one gets .pub")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    level = logging.WARNING if args.quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
    try:
        code: int = args.run(args)
    except (PulseError, OSError, ValueError) as error:
        logger.error("%s", error)
        return 3 if isinstance(error, StaleBaseError) else 4 if isinstance(error, CorruptPatchError) else 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
