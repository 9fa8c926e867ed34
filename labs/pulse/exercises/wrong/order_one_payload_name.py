"""Wrong: every version has the same payload name, so a crash leaves the new bytes under the old marker."""

import hashlib


def publish(store, version: int, payload: bytes) -> None:
    digest = hashlib.sha256(payload).hexdigest()
    store.put("objects/newest", payload)  # named by its content: another payload never replaces it
    store.put(f"versions/{version:012d}", digest.encode())  # the marker comes last


def follow(store) -> tuple[int, bytes] | None:
    for name in reversed([n for n in store.names() if n.startswith("versions/")]):
        marker = store.get(name)
        payload = store.get("objects/newest") if marker else None
        if payload is not None:
            return int(name.removeprefix("versions/")), payload
    return None
