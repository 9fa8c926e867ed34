"""The CPU hot loops, compiled by Numba on first use; import this module only where they run.

Plain functions over 1-D arrays: they hold no lock (``nogil``), allocate nothing and check every index that comes from
outside, for Numba does not. Compiled code is kept in Numba's cache, beside this file or, where that is read-only, in
the user's cache folder; where there is neither it is compiled anew in each process.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from dist_lib.pulse._vector import LANES, different, lowest, ones

logger = logging.getLogger(__name__)
Array = Any
i64: Any = np.int64
OK, BAD = 0, -1


@lru_cache(maxsize=1)
def _sources() -> str:
    """Digest of all files with compiled loops."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("_*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def compiled(function: Any) -> Any:
    """Compile a function on first use, without the interpreter's lock.

    Numba takes kept code for current as long as the function's own file is; here, as long as all files are, for code
    of a function contains that of those which it calls.
    """
    try:
        made: Any = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep compiled code in
        logger.info("%s is compiled anew in each process", function.__name__)
        return njit(nogil=True)(function)
    with suppress(AttributeError, OSError):  # of a Numba that keeps its code in another way, or without sources
        made._cache._cache_file._source_stamp = _sources()
    return made


@compiled
def gap_pack(positions: Array, gaps: Array, escapes: Array) -> Any:
    """Gaps less one as bytes, 255 for an escape whose rest follows as LEB128; returns bytes of escapes."""
    used, last = 0, -1
    for i in range(positions.size):
        gap = i64(positions[i]) - last - 1
        last = i64(positions[i])
        if gap < 255:
            gaps[i] = gap
            continue
        gaps[i] = 255
        gap -= 255
        while gap >= 128:
            escapes[used] = (gap & 127) | 128
            gap >>= 7
            used += 1
        escapes[used] = gap
        used += 1
    return used


@compiled
def gap_unpack(gaps: Array, escapes: Array, size: Any, out: Array) -> Any:
    """Inverse of ``gap_pack`` for positions below ``size``; BAD for anything that it would not have written."""
    used, last = 0, -1
    for i in range(gaps.size):
        gap = i64(gaps[i])
        if gap == 255:
            shift, byte = 0, 128
            while byte >= 128:
                if used >= escapes.size or shift > 28:
                    return BAD
                byte = i64(escapes[used])
                used += 1
                gap += (byte & 127) << shift
                shift += 7
            if byte == 0 and shift > 7:
                return BAD
        last += gap + 1
        if last >= size:
            return BAD
        out[i] = last
    return OK if used == escapes.size else BAD


@compiled
def changed(old: Array, new: Array, positions: Array, before: Array, after: Array) -> Any:
    """Write index, old and new bits of the cells that differ, in order, as far as there is room; counts them all."""
    n, whole, room = 0, old.size - old.size % LANES, positions.size
    for start in range(0, whole, LANES):
        mask = different(old, new, start)
        if n + LANES > room and n + ones(mask) > room:
            n += ones(mask)
            continue
        while mask != 0:
            i = start + lowest(mask)
            positions[n], before[n], after[n] = i, old[i], new[i]
            n += 1
            mask &= mask - np.uint64(1)
    for i in range(whole, old.size):
        if old[i] != new[i]:
            if n < room:
                positions[n], before[n], after[n] = i, old[i], new[i]
            n += 1
    return n
