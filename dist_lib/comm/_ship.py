"""Make a function importable in another process: by its module, or by shipping the source of a notebook cell.

``multiprocessing`` pickles a function as "module and name". A function defined in a notebook cell lives in
``__main__``, which another process cannot import. :func:`ship` writes its source, with what it refers to, as a
temporary module.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class ShipError(ValueError):
    """A function that no other process can be given."""


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return isinstance(value, _PLAIN)


def _source(fn: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError) as error:
        raise ShipError(
            f"the source of {fn.__name__!r} cannot be found; define it in a .py file or a notebook cell"
        ) from error


def _collect(fn: Callable[..., Any], main: str, lines: dict[str, str]) -> None:
    """Add to ``lines`` (name -> definition) everything that ``fn`` needs, dependencies first."""
    code = getattr(fn, "__code__", None)
    if code is None or fn.__name__ == "<lambda>" or fn.__closure__:
        raise ShipError(f"{fn!r} is a lambda, a closure or not a plain function; use a def at the top level of a cell")
    for name in sorted(_names(code) & set(fn.__globals__)):
        value = fn.__globals__[name]
        if name in lines or value is fn:
            continue
        module = getattr(value, "__module__", None)
        if isinstance(value, types.ModuleType):
            lines[name] = (
                f"import {value.__name__} as {name}"
                if "." not in value.__name__
                else (f"import importlib\n{name} = importlib.import_module({value.__name__!r})")
            )
        elif isinstance(value, types.FunctionType) and module == main:
            lines[name] = ""  # breaks recursion
            _collect(value, main, lines)
            lines[name] = lines.pop(name) or _source(value)
        elif isinstance(module, str) and module != main and hasattr(value, "__qualname__"):
            lines[name] = f"from {module} import {value.__qualname__} as {name}"
        elif _is_plain(value):
            lines[name] = f"{name} = {value!r}"
        else:
            raise ShipError(
                f"function {fn.__name__!r} refers to the notebook variable {name!r} of type {type(value).__name__}, "
                f"which cannot be written down for another process; pass it through args= instead"
            )


def ship(fn: Callable[..., Any], directory: Path) -> tuple[str, str, str | None]:
    """Return ``(module, qualname, path)``; ``path`` is a folder to put on ``sys.path``, or None.

    Raises:
        ShipError: a lambda, a nested function, or a cell function that refers to something without a written form.
    """
    module = getattr(fn, "__module__", None)
    qualname = getattr(fn, "__qualname__", "")
    if module is None or "<locals>" in qualname or "<lambda>" in qualname:
        raise ShipError(f"{fn!r} is a lambda or is defined inside another function; move it to the top level")
    main_module = inspect.getmodule(fn)
    if module != "__main__" or getattr(main_module, "__spec__", None) is not None:
        name = module if module != "__main__" else main_module.__spec__.name  # type: ignore[union-attr]
        return name, qualname, None
    if getattr(main_module, "__file__", None):
        # A script: its own file can be imported under another name, as long as it guards its entry point.
        source = Path(str(main_module.__file__)).read_text(encoding="utf-8")  # type: ignore[union-attr]
    else:
        lines: dict[str, str] = {}
        _collect(fn, module, lines)
        source = "\n\n".join([*lines.values(), _source(fn)])
    name = "shipped_" + hashlib.sha256(source.encode()).hexdigest()[:16]
    (directory / f"{name}.py").write_text(source + "\n", encoding="utf-8")
    return name, qualname, str(directory)
