"""Make, write, read and apply patches: from one state to another without a differing bit.

``diff`` compares bit patterns and never values. ``apply`` is a transaction: the base is checked, the result is built
beside it and its digests are checked, and only then is anything handed out. Tied tensors travel once and share
storage afterwards. Nothing here talks to a store: see :mod:`dist_lib.pulse.publisher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse import format as fileformat
from dist_lib.pulse.codecs import (
    Change,
    Place,
    decode_full,
    decode_segment,
    encode_change,
    encode_full,
    encode_segment,
    get_codec,
)
from dist_lib.pulse.errors import CorruptPatchError, StaleBaseError, StateError
from dist_lib.pulse.format import Entry, Limits, Patch, segment_cells
from dist_lib.pulse.state import (
    State,
    StateDigest,
    TensorSpec,
    as_bytes,
    as_words,
    digest_state,
    find_ties,
    from_words,
    in_threads,
    spec_of,
    tensor_digest,
)
from dist_lib.pulse.wire import Reader, Words


def diff(
    base: State | None,
    new: State,
    *,
    base_version: int = 0,
    version: int | None = None,
    base_digest: StateDigest | None = None,
    workers: int | None = None,
) -> Patch:
    """Compare two states bit by bit.

    The patch refers to both states until it is encoded: leave them unchanged until then.

    Args:
        base: what receivers hold; None for an anchor that needs no base.
        new: what they shall hold. Names, shapes and dtypes may differ from the base's in any way.
        base_version: of the base, at least 0.
        version: of the new state; None for the one after the base (for an anchor: ``base_version``).
        base_digest: digest of the base where it is known; None to compute it.
        workers: threads; None for two.

    Raises:
        StateError: something that is not a dense tensor; says its name.
        ValueError: a negative version.
    """
    after = base_version + (base is not None) if version is None else version
    if base_version < 0 or after < 0:
        raise ValueError(f"versions count from 0, not {base_version} to {after}")
    old: State = base if base is not None else {}
    digest = digest_state(new, workers=workers)
    ties = find_ties(new)

    def entry(name: str) -> Entry:
        spec = spec_of(name, new[name])
        if name in ties:
            return Entry(name, spec, "alias", digest.tensors[name], ties[name])
        known = name in old and spec_of(name, old[name]) == spec
        same = known and _equal(old[name], new[name], spec)
        return Entry(name, spec, "same" if same else "cells" if known else "full", digest.tensors[name])

    entries = tuple(in_threads(entry, sorted(new), workers))
    before = None if base is None else (base_digest or digest_state(base, workers=workers)).whole
    return Patch(
        after, None if base is None else base_version, before, digest.whole, None, entries, (dict(old), dict(new))
    )


def _equal(old: Tensor, new: Tensor, spec: TensorSpec) -> bool:
    """Whether all bits are equal; on a CPU piece by piece, and no further than the first that is not."""
    if old.device == new.device and old.device.type != "cpu":
        return torch.equal(_flat_bytes(old), _flat_bytes(new))
    a, b = as_words(old), as_words(new)
    return all(np.array_equal(a[start : start + n], b[start : start + n]) for start, n in segment_cells(spec))


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def device_changes(old: Tensor, new: Tensor, spec: TensorSpec) -> list[Change]:
    """The changes in each segment of a tensor of 16-bit cells, found where it lies; only they are copied to the CPU."""
    from dist_lib.ops import bit_changes

    flat = [_flat_bytes(t).view(torch.int16) for t in (old, new)]
    found = bit_changes(*flat)
    before, after = (t[found].cpu().numpy().view(np.uint16) for t in flat)
    positions = found.cpu().numpy()
    changes = []
    for start, cells in segment_cells(spec):
        here = slice(*np.searchsorted(positions, (start, start + cells)))
        changes.append(Change(cells, (positions[here] - start).astype(np.uint32), before[here], after[here]))
    return changes


def _code_cells(entry: Entry, old: Tensor, new: Tensor, codec: str) -> list[bytes]:
    """Coded segments of a tensor that the base has; only changes leave an accelerator, where they suffice."""
    chosen, spec = get_codec(codec), entry.spec
    places = [Place(spec, start) for start, _ in segment_cells(spec)]
    if old.device == new.device and old.device.type == "cuda" and spec.width == 2:
        base = as_words(old) if chosen.needs_base else None
        changes = zip(places, device_changes(old, new, spec), strict=True)
        return [encode_change(chosen, None if base is None else base[p.start :][: c.cells], c, p) for p, c in changes]
    a, b = as_words(old), as_words(new)
    pieces = [slice(start, start + cells) for start, cells in segment_cells(spec)]
    return [encode_segment(chosen, a[s], b[s], place) for s, place in zip(pieces, places, strict=True)]


def _encode_entry(entry: Entry, old: State, new: State, codec: str) -> Entry:
    if entry.kind not in ("cells", "full"):
        return entry
    kind, based = entry.kind, entry.kind == "cells"
    coded = _code_cells(entry, old[entry.name], new[entry.name], codec) if based else []
    if not based or sum(map(len, coded)) > entry.spec.nbytes // 2:
        words = as_words(new[entry.name])
        full = [encode_full(words[a : a + n]) for a, n in segment_cells(entry.spec)]
        if not based or sum(map(len, full)) < sum(map(len, coded)):
            kind, coded = "full", full
    if kind == "cells" and not any(coded):
        raise StateError(f"{entry.name!r} was changed after the diff; encode a patch before its states go on")
    return replace(entry, kind=kind, segments=tuple(memoryview(c) for c in coded))


def encode(patch: Patch, codec: str | None = None, *, workers: int | None = None) -> bytes:
    """The file of a patch, ready to be stored or sent.

    Args:
        patch: from :func:`diff`, or from :func:`decode` to write it again.
        codec: ``"paper"``, ``"fast"`` or ``"small"``; None for ``"fast"``, or for the one that it was read with.
        workers: threads; None for two.

    Raises:
        ValueError: an unknown codec, or another one than a decoded patch has.
        StateError: a state was changed since the diff.
    """
    if patch.source is None:
        if codec not in (None, patch.codec):
            raise ValueError(f"a decoded patch keeps its codec {patch.codec!r}; diff the states to use {codec!r}")
        return fileformat.write(patch)
    name = get_codec("fast" if codec is None else codec).name
    old, new = patch.source
    entries = in_threads(lambda e: _encode_entry(e, old, new, name), patch.entries, workers)
    return fileformat.write(replace(patch, codec=name, entries=tuple(entries), source=None))


def decode(data: bytes | memoryview, limits: Limits | None = None) -> Patch:
    """Read a patch file and check all that can be checked without its base.

    Args:
        data: the file; the patch keeps views of it.
        limits: what is granted to it; None for the defaults.

    Raises:
        CorruptPatchError: any deviation from the format or from its seal.
        LimitError: more is claimed than is granted.
    """
    return fileformat.read(data, limits)


def _new_words(entry: Entry, base: Tensor | None, codec: str) -> Words:
    words = np.empty(entry.spec.cells, np.dtype(f"u{entry.spec.width}"))
    old = as_words(base) if base is not None else None
    for (start, cells), data in zip(segment_cells(entry.spec), entry.segments, strict=True):
        here = slice(start, start + cells)
        if entry.kind == "full" or old is None:
            words[here] = decode_full(data, cells, entry.spec.width, f"tensor {entry.name!r}")
        else:
            decode_segment(get_codec(codec), data, old[here], Place(entry.spec, start), words[here])
    return words


def _check_base(patch: Patch, state: State, known: StateDigest | None, workers: int | None) -> StateDigest | None:
    if patch.base_digest is None:
        return None
    found = known or digest_state(state, workers=workers)
    if found.whole != patch.base_digest:
        raise StaleBaseError(
            f"the patch to version {patch.version} needs base version {patch.base_version} with digest "
            f"{patch.base_digest.hex()[:16]}, but this state has {found.hex[:16]}; "
            "fetch the versions between or an anchor"
        )
    return found


def apply(
    patch: Patch, state: State, *, known: StateDigest | None = None, workers: int | None = None
) -> dict[str, Tensor]:
    """The new state; ``state`` itself is never written to.

    Args:
        patch: from :func:`decode` or :func:`diff`.
        state: the base; ignored by an anchor.
        known: digest of ``state`` from the last apply; None to compute it. The result is hashed either way, so a
            base that is not what it is said to be is found.
        workers: threads; None for two.

    Returns:
        A tensor for each name, in order; unchanged ones are the base's own, tied ones share storage, new ones are on
        the CPU, and changed ones on the device of their base. Its digest is ``patch.digest``.

    Raises:
        StaleBaseError: the patch is for another base; nothing is damaged.
        CorruptPatchError: the bytes do not decode, or their result has another digest than announced.
    """
    if patch.source is not None or patch.codec is None:
        patch = decode(encode(patch))
    codec = patch.codec or ""
    found = _check_base(patch, state, known, workers)
    base_ties = find_ties(state)

    def blame(entry: Entry, why: str) -> Exception:
        if found is not None and entry.name in state and known is not None:
            now = tensor_digest(spec_of(entry.name, state[entry.name]), as_bytes(state[entry.name]))
            if now != known.tensors.get(entry.name):
                return StaleBaseError(f"{entry.name!r} of the base is no longer what its known digest says")
        return CorruptPatchError(f"patch to version {patch.version}, tensor {entry.name!r}: {why}")

    def build(entry: Entry) -> Tensor | None:
        if entry.kind == "alias":
            return None
        base = state.get(entry.name) if entry.kind != "full" else None
        if entry.kind != "full" and (base is None or spec_of(entry.name, base) != entry.spec):
            raise blame(entry, "the base has no such tensor")
        if entry.kind == "same" and base is not None:
            fresh = known is None and found is not None
            digest = found.tensors[entry.name] if fresh and found else tensor_digest(entry.spec, as_bytes(base))
            tensor = base.clone() if entry.name in base_ties else base
        else:
            try:
                words = _new_words(entry, base, codec)
            except CorruptPatchError as error:
                raise blame(entry, str(error)) from error
            digest = tensor_digest(entry.spec, words)
            tensor = from_words(words, entry.spec)
            tensor = tensor.to(base.device) if base is not None else tensor
        if digest != entry.digest:
            raise blame(entry, "the result has another digest than announced")
        return tensor

    built = in_threads(build, patch.entries, workers)
    result: dict[str, Tensor] = {}
    for entry, tensor in zip(patch.entries, built, strict=True):
        result[entry.name] = result[entry.alias] if entry.alias is not None else tensor  # type: ignore[assignment]
    return result


def apply_in_place(
    patch: Patch, state: State, *, known: StateDigest | None = None, workers: int | None = None
) -> list[str]:
    """Apply to live tensors, such as a model's: all changed tensors are staged and verified, then copied over.

    Args:
        patch, known, workers: see :func:`apply`.
        state: what is written to; must have the names, shapes and dtypes of the result.

    Returns:
        Names of the tensors that were written.

    Raises:
        StateError: another set of names, another shape or dtype, or storage shared in another way; all is as before.
        StaleBaseError, CorruptPatchError: see :func:`apply`; all is as before.
    """
    wanted = patch.specs
    have: Mapping[str, TensorSpec] = {name: spec_of(name, tensor) for name, tensor in state.items()}
    if dict(have) != dict(wanted):
        wrong = sorted(n for n in set(have) | set(wanted) if have.get(n) != wanted.get(n))
        raise StateError(f"in place, names, shapes and dtypes must stay; these differ: {wrong[:5]}; use apply()")
    ties = find_ties(state)
    told = patch.tensor_digests
    split = sorted(name for name, owner in ties.items() if told[name] != told[owner])
    if split:
        raise StateError(f"{split[:5]} share storage with other names here, but no longer in the result; use apply()")
    result = apply(patch, state, known=known, workers=workers)
    written = [n for n in result if result[n] is not state[n] and n not in ties]
    views = _overlapping(state, ties)
    before = {name: state[name].clone() for name in written} if views else {}
    with torch.no_grad():
        for name in written:
            state[name].copy_(result[name])
        torn = sorted(n for n in views if tensor_digest(wanted[n], as_bytes(state[n])) != told[n])
        for name in written if torn else ():
            state[name].copy_(before[name])
    if torn:
        raise StateError(f"{torn[:5]} overlap other tensors here, but not in the result; use apply()")
    return written


def _overlapping(state: State, ties: Mapping[str, str]) -> list[str]:
    """Names whose storage other names use as well without being the same tensor, such as parts of a fused matrix."""
    users: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if name not in ties and tensor.numel():
            users.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in users.values() if len(names) > 1 for name in names]


def changed_cells(patch: Patch) -> dict[str, int]:
    """Changed cells of each tensor of an encoded patch, as the segments state them; whole tensors count in full."""
    counts = {}
    for entry in patch.entries:
        if entry.kind == "full":
            counts[entry.name] = entry.spec.cells
        else:
            counts[entry.name] = sum(Reader(s, entry.name).number(entry.spec.cells) for s in entry.segments if len(s))
    return counts
