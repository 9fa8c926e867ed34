"""What a version consists of, who says so, and where it is written down.

A *manifest* names the version, its base, its digests and the payloads that it is made of; it is content, named by its
SHA-256. A *marker* ``versions/<number>.patch`` or ``versions/<number>.anchor`` names the manifest and carries the
publisher's Ed25519 signature over it. A version counts as published from the moment when its marker is visible, not
before. ``head`` is a hint: the newest version and anchors at the time of writing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dist_lib.pulse.errors import CorruptPatchError, MissingPackageError
from dist_lib.pulse.store import Store

FORMAT = 1
MOST_MANIFEST = 1 << 20
MOST_MARKER = 1 << 12
HEAD = "head"
_CONTEXT = b"dist-lib pulse manifest 1\n"


class SignatureError(CorruptPatchError):
    """A manifest that the expected publisher has not signed."""


@dataclass(frozen=True)
class Part:
    """One payload of a version: SHA-256 and size of a patch file, over names that no other part has."""

    digest: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """One published version.

    Attributes:
        kind: ``"patch"`` or ``"anchor"``.
        version: number.
        base_version: the version that a patch applies to; None for an anchor.
        parts: payloads, at least one; several where ranks publish their own shards.
        created: seconds since 1970 by the publisher's clock.
    """

    kind: str
    version: int
    base_version: int | None
    parts: tuple[Part, ...]
    created: float

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(p.size for p in self.parts)

    def write(self) -> bytes:
        """Canonical JSON."""
        return _canonical(
            {
                "format": FORMAT,
                "kind": self.kind,
                "version": self.version,
                "base_version": self.base_version,
                "parts": [[p.digest, p.size] for p in self.parts],
                "created": self.created,
            }
        )


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
        if not isinstance(value, dict) or _canonical(value) != data:
            raise CorruptPatchError(f"{what} is not canonical JSON")
    except (ValueError, RecursionError) as error:
        raise CorruptPatchError(f"{what} is not JSON: {error}") from error
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def read_manifest(data: bytes) -> Manifest:
    """Inverse of :meth:`Manifest.write`.

    Raises:
        CorruptPatchError: anything else than what it writes.
    """
    value = _parse(data, "the manifest")
    keys = {"format", "kind", "version", "base_version", "parts", "created"}
    parts, base = value.get("parts"), value.get("base_version")
    good = (
        set(value) == keys
        and value["format"] == FORMAT
        and value["kind"] in ("patch", "anchor")
        and _is_count(value["version"])
        and (base is None) == (value["kind"] == "anchor")
        and (base is None or (_is_count(base) and base < value["version"]))
        and isinstance(value["created"], (int, float))
        and isinstance(parts, list)
        and 0 < len(parts) <= 1 << 14
        and all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) and _is_count(p[1]) for p in parts)
    )
    if not good or parts is None:
        raise CorruptPatchError(f"not a manifest of format {FORMAT}: {data[:200]!r}")
    return Manifest(value["kind"], value["version"], base, tuple(Part(*p) for p in parts), value["created"])


def marker_name(version: int, kind: str) -> str:
    """Name of a marker; padded, so that names sort as numbers do."""
    return f"versions/{version:020d}.{kind}"


def load_key(private: bytes) -> Any:
    """An Ed25519 private key from its 32 bytes.

    Raises:
        ValueError: not 32 bytes.
    """
    return _ed25519().Ed25519PrivateKey.from_private_bytes(private)


def public_bytes(key: Any) -> bytes:
    """The 32 bytes of the public key that belongs to a private one."""
    raw: bytes = key.public_key().public_bytes_raw()
    return raw


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingPackageError("cryptography", "signing or checking a manifest") from error
    return ed25519


def commit(store: Store, manifest: Manifest, key: Any = None) -> None:
    """Write the manifest, then the marker. Its payloads must be stored already.

    Args:
        store: where to.
        manifest: what to publish.
        key: private key to sign with; None for no signature.

    Raises:
        ObjectExistsError: this version was published with other content.
    """
    data = manifest.write()
    digest = store.put_content(data)
    signature = key.sign(_CONTEXT + data).hex() if key is not None else None
    marker = _canonical({"manifest": digest, "size": len(data), "signature": signature})
    store.put_marker(marker_name(manifest.version, manifest.kind), marker)


def fetch(store: Store, version: int, kind: str, public_key: bytes | None = None) -> Manifest:
    """Read the marker of a version, then its manifest, and check both.

    Args:
        store: where from.
        version, kind: which.
        public_key: 32 bytes; only what this key has signed is accepted. None accepts everything.

    Raises:
        MissingObjectError: not published, or no longer there.
        SignatureError: not signed with this key.
        CorruptPatchError: damaged, or the manifest of something else.
    """
    name = marker_name(version, kind)
    marker = _parse(store.get(name, MOST_MARKER), name)
    size, digest, signature = marker.get("size"), marker.get("manifest"), marker.get("signature")
    if set(marker) != {"manifest", "size", "signature"} or not _is_count(size) or not isinstance(digest, str):
        raise CorruptPatchError(f"{name} is not a marker")
    if size is None or size > MOST_MANIFEST:
        raise CorruptPatchError(f"{name} announces a manifest of {size} bytes")
    data = store.get_content(digest, size)
    if public_key is not None:
        _check_signature(public_key, signature, data, name)
    manifest = read_manifest(data)
    if (manifest.version, manifest.kind) != (version, kind):
        raise CorruptPatchError(f"{name} leads to the manifest of {manifest.kind} {manifest.version}")
    return manifest


def _check_signature(public_key: bytes, signature: Any, data: bytes, name: str) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        if not isinstance(signature, str):
            raise SignatureError(f"{name} is not signed, but only signed versions are accepted")
        _ed25519().Ed25519PublicKey.from_public_bytes(public_key).verify(bytes.fromhex(signature), _CONTEXT + data)
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(f"{name} is not signed with the key that is accepted") from error


@dataclass(frozen=True)
class Head:
    """A hint: the newest version and the anchors, newest first, when it was written."""

    version: int
    anchors: tuple[int, ...]


def write_head(store: Store, head: Head) -> None:
    """Replace the hint."""
    store.put(HEAD, _canonical({"version": head.version, "anchors": list(head.anchors)}))


def read_head(store: Store) -> Head:
    """The hint as it stands.

    Raises:
        MissingObjectError: nothing was published yet.
        CorruptPatchError: it is damaged.
    """
    value = _parse(store.get(HEAD, MOST_MANIFEST), "the head")
    version, anchors = value.get("version"), value.get("anchors")
    if not _is_count(version) or not isinstance(anchors, list) or not all(map(_is_count, anchors)) or version is None:
        raise CorruptPatchError("the head is damaged")
    return Head(version, tuple(anchors[:1024]))
