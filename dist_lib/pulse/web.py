"""Reading from a web server: a broken transfer goes on where it stopped, and caches serve what cannot change.

Contents named by their digest may come from any cache on the way; markers and hints are asked for anew each time, also
while they are not there yet. Only the standard library is used. Nothing here checks what arrives: see
:class:`~dist_lib.pulse.store.Store`.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from dist_lib.pulse.errors import LimitError

TIMEOUT_S = 30.0
PIECE = 1 << 20
_GONE = (404, 410)
_LATER = (408, 416, 425, 429)  # answers of 400 to 499 after which the same may be asked again


class RefusedError(OSError):
    """The server says no in a way that asking again does not change."""


@dataclass
class Download:
    """One object on its way. What has arrived survives a failure: the next attempt asks for the rest only.

    Attributes:
        url: of the object.
        most: bytes that are accepted.
        fixed: its content never changes: caches may serve it, and a broken transfer can be gone on with.
        fresh: pass by all caches even so.
        resumed: attempts that went on in the middle.
    """

    url: str
    most: int
    fixed: bool = False
    fresh: bool = False
    resumed: int = field(default=0, init=False)
    _data: bytearray = field(default_factory=bytearray, init=False, repr=False)
    _tag: str | None = field(default=None, init=False, repr=False)

    def attempt(self) -> bytes:
        """All bytes of the object.

        Raises:
            FileNotFoundError: there is none.
            LimitError: it has more than ``most`` bytes; no more are read.
            RefusedError: the server will not give it.
            OSError: the transfer broke; call again to go on.
        """
        headers = {} if self.fixed and not self.fresh else {"Cache-Control": "no-cache"}
        if self._data and self.fixed:
            headers["Range"] = f"bytes={len(self._data)}-"
            if self._tag:
                headers["If-Range"] = self._tag
        try:
            with ask(self.url, "GET", headers) as answer:
                self._receive(answer)
        except http.client.HTTPException as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error
        return bytes(self._data)

    def _receive(self, answer: Any) -> None:
        if answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {len(self._data)}-"):
            self.resumed += 1
        else:
            self._data.clear()
            if answer.status == 206:
                raise OSError(f"{self.url}: another range than the one asked for")
            tag = answer.headers.get("ETag", "")
            self._tag = tag if tag.startswith('"') else None  # a weak tag does not stand for the same bytes
        length = answer.headers.get("Content-Length")
        whole = len(self._data) + int(length) if length and length.isdigit() else None
        if (whole or 0) > self.most:
            raise LimitError(f"{self.url} has {whole} bytes, more than the {self.most} that are granted")
        while len(self._data) <= self.most:
            piece = answer.read(min(PIECE, self.most + 1 - len(self._data)))
            if not piece:
                break
            self._data += piece
        if len(self._data) > self.most:
            raise LimitError(f"{self.url} has more than the {self.most} bytes that are granted")
        if whole is not None and len(self._data) != whole:
            raise OSError(f"{self.url}: the transfer ended after {len(self._data)} of {whole} bytes")


def ask(url: str, method: str, headers: dict[str, str] | None = None) -> Any:
    """The answer to one request.

    Raises:
        FileNotFoundError: there is nothing (404 or 410).
        RefusedError: any other answer from 400 to 499 that will stay the same.
        OSError: everything else that went wrong.
    """
    request = urllib.request.Request(url, method=method, headers=headers or {})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _GONE:
            raise FileNotFoundError(url) from error
        if 400 <= error.code < 500 and error.code not in _LATER:
            raise RefusedError(f"{url}: {error.code} {error.reason}") from error
        raise OSError(f"{url}: {error.code} {error.reason}") from error
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def length_of(url: str) -> int:
    """Bytes of an object, asked anew.

    Raises:
        FileNotFoundError, RefusedError, OSError: see :func:`ask`.
    """
    with ask(url, "HEAD", {"Cache-Control": "no-cache"}) as answer:
        return int(answer.headers.get("Content-Length") or 0)
