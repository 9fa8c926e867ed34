"""A real text corpus that needs no download: the source text of a pinned package.

sympy 1.14.0 (BSD-3-Clause) is already installed as a dependency of torch. Its modules, without their tests, are some
ten million bytes of Python and English. Tokens are bytes. The text is checked by its SHA-256, so the same numbers
come out everywhere or an error does.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

PACKAGE, VERSION = "sympy", "1.14.0"
SHA256 = "7f3ed17f95d6476a6c997c2065fb4b1e57dacc9e2ae4078aea619b7134e6cad6"
VAL_EVERY = 20  # every 20th file, in order of path, is held out


class CorpusError(RuntimeError):
    """The corpus is missing or is not the text that it should be."""


@dataclass(frozen=True)
class TextCorpus:
    """Bytes of text, split by file into parts that share no file.

    Attributes:
        train: 1-D uint8.
        val: 1-D uint8, about a twentieth.
    """

    train: Tensor
    val: Tensor

    vocab_size = 256


def _files() -> Sequence[Path]:
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise CorpusError(
            f"the corpus is the source of {PACKAGE}=={VERSION}, which is missing; run `make setup`"
        ) from error
    if version != VERSION:
        raise CorpusError(
            f"the corpus is the source of {PACKAGE}=={VERSION}, but {version} is installed; run `make setup`, or "
            f"pip install {PACKAGE}=={VERSION}"
        )
    listed = importlib.metadata.files(PACKAGE) or []
    names = [f for f in listed if str(f).startswith("sympy/") and str(f).endswith(".py") and "/tests/" not in str(f)]
    return [Path(str(f.locate())) for f in sorted(names, key=str)]


@lru_cache(maxsize=1)
def load_corpus() -> TextCorpus:
    """Read the corpus and check its hash (about a second; kept in memory afterwards).

    Raises:
        CorpusError: a missing package, another version, or changed files; says what to do.
    """
    digest, parts = hashlib.sha256(), ([], [])  # type: tuple[hashlib._Hash, tuple[list[bytes], list[bytes]]]
    for index, path in enumerate(_files()):
        data = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(data)
        parts[index % VAL_EVERY == 0].append(data)
    if digest.hexdigest() != SHA256:
        raise CorpusError(
            f"the source of {PACKAGE}=={VERSION} has SHA-256 {digest.hexdigest()}, not {SHA256}: its files were "
            f"changed; pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}"
        )
    train, val = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return TextCorpus(train, val)
