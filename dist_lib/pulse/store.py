"""Objects in a folder, a bucket or behind a web server, through fsspec: few operations, each whole or not at all.

Three sorts of objects live in a store. *Contents* are named by their SHA-256 and never change. *Markers* say that a
version is there; each is written once, after everything that it refers to. *Hints* may be overwritten at any time and
are never needed: losing one costs a few look-ups. Nothing lists a store in order to follow it, so that plain HTTP
suffices there.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dist_lib.pulse.errors import CorruptPatchError, LimitError, MissingPackageError, PulseError
from dist_lib.pulse.web import Download, RefusedError, length_of

logger = logging.getLogger(__name__)
R = TypeVar("R")
# Whose exceptions mean that the network or the server failed although they are no OSError.
_CLIENTS = ("aiobotocore", "aiohttp", "botocore", "urllib3")


class MissingObjectError(PulseError):
    """There is no such object (yet, or any more)."""


class ObjectExistsError(PulseError):
    """A marker of this name is there already with other content: two publishers write to one store."""


@dataclass
class Metrics:
    """What a store was asked for and what it cost.

    Attributes:
        gets, puts, deletes: operations that succeeded.
        bytes_in, bytes_out: of contents, markers and hints.
        retries: operations that failed and were tried again.
        resumes: transfers that went on in the middle.
        seconds: spent in operations, waits included.
    """

    gets: int = 0
    puts: int = 0
    deletes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    retries: int = 0
    resumes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Retry:
    """How often an operation is tried, and how long is waited in between.

    Attributes:
        attempts: at least 1.
        first_s: wait after the first failure; doubled after each further one, and shortened by up to half at random.
        most_s: longest wait.
    """

    attempts: int = 5
    first_s: float = 0.1
    most_s: float = 10.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)


@dataclass
class Store:
    """One place of objects.

    Args:
        url: ``/a/folder``, ``file://``, ``memory://``, ``s3://bucket/prefix``, ``http(s)://`` (read only, by the
            standard library) or any other that fsspec knows.
        options: for fsspec's file system, such as ``endpoint_url``.
        retry: for operations that fail for other reasons than a missing object.
    """

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    retry: Retry = field(default_factory=Retry)
    metrics: Metrics = field(default_factory=Metrics, init=False)

    def __post_init__(self) -> None:
        protocol = self.url.split("://")[0] if "://" in self.url else "file"
        self._doubted: set[str] = set()
        self._web, self._local = protocol in ("http", "https"), protocol == "file"
        if self._web:
            self._root = self.url
            return
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise MissingPackageError("fsspec", "a store") from error
        fresh = {} if protocol in ("file", "memory") else {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **{**fresh, **self.options})
        except ImportError as error:
            if protocol != "s3":
                raise
            raise MissingPackageError("s3fs", "a store in S3", "s3") from error
        if protocol == "s3":
            self._fs.retries = 1  # trying again is done here, where it is counted and logged

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if not all(p and not p.startswith(".") and p.isprintable() for p in parts):
            raise ValueError(f"{name!r} is not the name of an object")
        return f"{self._root.rstrip('/')}/{name}"

    def _refuse_web(self, what: str) -> None:
        if self._web:
            raise io.UnsupportedOperation(f"{self.url} is a web server: it can be followed, but not {what}")

    def _try(self, what: str, operation: Callable[[], R]) -> R:
        start = time.monotonic()
        try:
            for attempt in range(self.retry.attempts):
                try:
                    return operation()
                except FileNotFoundError as error:
                    raise MissingObjectError(f"{what}: there is no such object in {self.url}") from error
                except (PulseError, RefusedError):
                    raise
                except Exception as error:
                    known = isinstance(error, OSError)
                    if not known and type(error).__module__.partition(".")[0] not in _CLIENTS:
                        raise
                    if attempt + 1 == self.retry.attempts:
                        if known:
                            raise
                        raise OSError(f"{what} in {self.url}: {type(error).__name__}: {error}") from error
                    self.metrics.retries += 1
                    wait = min(self.retry.first_s * 2**attempt, self.retry.most_s) * random.uniform(0.5, 1)
                    logger.warning("%s failed (%s); tried again in %.2f s", what, error, wait)
                    self.retry.sleep(wait)
            raise ValueError(f"at least one attempt is needed, not {self.retry.attempts}")
        finally:
            self.metrics.seconds += time.monotonic() - start

    def get(self, name: str, most: int) -> bytes:
        """Content of an object of at most ``most`` bytes.

        Raises:
            MissingObjectError: there is none.
            LimitError: it is larger; no more than ``most`` bytes are read.
            OSError: the store failed at every attempt.
        """
        path = self._path(name)
        download = Download(path, most, fixed=name.startswith("objects/"), fresh=name in self._doubted)

        def read() -> bytes:
            if self._web:
                return download.attempt()
            options = {} if self._local else {"cache_type": "none"}
            with self._fs.open(path, "rb", **options) as file:
                data: bytes = file.read(most + 1)
            return data

        data = self._try(f"get {name}", read)
        self.metrics.resumes += download.resumed
        if len(data) > most:
            raise LimitError(f"{name} has more than the {most} bytes that are granted")
        self.metrics.gets += 1
        self.metrics.bytes_in += len(data)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Write an object whole or not at all; one that is there is replaced.

        Raises:
            OSError: the store failed at every attempt; whether the object was written is then unknown.
            io.UnsupportedOperation: the store is a web server.
        """
        path = self._path(name)
        self._refuse_web("written to")
        self._try(f"put {name}", lambda: self._write(path, data))
        self.metrics.puts += 1
        self.metrics.bytes_out += len(data)

    def _write(self, path: str, data: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(path, data)
            return
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        beside = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}.{random.getrandbits(32):08x}")
        try:
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            if os.path.exists(beside):
                os.unlink(beside)
            raise

    def put_content(self, data: bytes) -> str:
        """Store bytes under their SHA-256 and return it in hexadecimal; a damaged object of that name is healed."""
        digest = hashlib.sha256(data).hexdigest()
        self.put(content_name(digest), data)
        return digest

    def get_content(self, digest: str, size: int) -> bytes:
        """Bytes by their SHA-256.

        Raises:
            MissingObjectError: they are not there.
            CorruptPatchError: other bytes are.
        """
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise CorruptPatchError(f"{digest!r} is no SHA-256")
        data = self.get(content_name(digest), size)
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            self._doubted.add(content_name(digest))  # next time, no cache may answer
            raise CorruptPatchError(f"object {digest[:16]} holds other bytes than its name says")
        self._doubted.discard(content_name(digest))
        return data

    def put_marker(self, name: str, data: bytes) -> None:
        """Write a marker once; writing the same again does nothing.

        Raises:
            ObjectExistsError: there is one with other content.
        """
        try:
            found = self.get(name, len(data) + 4096)
        except MissingObjectError:
            self.put(name, data)
            return
        if found != data:
            raise ObjectExistsError(f"{name} is there already with other content; does another publisher write here?")

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        path = self._path(name)

        def ask() -> int | None:
            if not self._web:
                found: int | None = self._fs.size(path)
                return found
            return length_of(path)

        try:
            size = self._try(f"size of {name}", ask)
        except MissingObjectError:
            return None
        return size

    def names(self, folder: str) -> dict[str, float]:
        """Objects below a folder, name to age in seconds (0 where it is unknown).

        Raises:
            io.UnsupportedOperation: the store is a web server.
        """
        self._refuse_web("listed")
        root = self._path(folder)

        def find() -> dict[str, Any]:
            found: dict[str, Any] = self._fs.find(root, detail=True)
            return found

        try:
            found = self._try(f"list {folder}", find)
        except MissingObjectError:
            return {}
        cut = len(self._fs._strip_protocol(self._root.rstrip("/"))) + 1
        return {path[cut:]: _age(info) for path, info in found.items() if not os.path.basename(path).startswith(".")}

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._refuse_web("deleted from")
        try:
            self._try(f"delete {name}", lambda: self._fs.rm_file(self._path(name)))
        except MissingObjectError:
            return
        self.metrics.deletes += 1


def _age(info: dict[str, Any]) -> float:
    for key in ("mtime", "LastModified", "created", "last_modified"):
        at = info.get(key)
        if isinstance(at, (int, float)):
            return max(0.0, time.time() - at)
        if at is not None and hasattr(at, "timestamp"):
            return max(0.0, time.time() - float(at.timestamp()))
    return 0.0


def content_name(digest: str) -> str:
    """Name of the object with this SHA-256."""
    return f"objects/{digest[:2]}/{digest}"
