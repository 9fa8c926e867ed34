"""Tables of the study's record."""

from typing import Any


def report(data: dict[str, Any]) -> str:
    """Text."""
    return "\n".join(f"{k} {r['loss']}" for k, r in data["runs"].items())
