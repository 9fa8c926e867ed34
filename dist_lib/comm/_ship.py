"""Make a function importable in another process: by its module, or by shipping the source of a notebook cell.

``multiprocessing`` pickles a function as "module and name". A function defined in a notebook cell lives in
``__main__``, which another process cannot import. :func:`ship` writes its source, with what it refers to, as a
temporary module: modules are imported again, functions of other cells come along as source, and plain values, dtypes
and other small things that pickle are copied as they are at that moment. :func:`pack` pickles arguments.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import io
import pickle
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class ShipError(ValueError):
    """A function that no other process can be given."""


SNAPSHOT_BYTES = 65536  # larger values belong in args=


def _global_names(code: types.CodeType) -> set[str]:
    """Names that ``code`` and the functions in it load as globals; attributes of the same name do not count."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _global_names(const)
    return names


def _names(fn: Callable[..., Any], source: str) -> set[str]:
    """Globals that the body, the default values and the decorators of ``fn`` need; annotations are not evaluated."""
    definition = ast.parse(source).body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise ShipError(f"{fn!r} is not written as a def; use a def at the top level of a cell")
    defaults = [*definition.args.defaults, *(d for d in definition.args.kw_defaults if d), *definition.decorator_list]
    outer = {n.id for d in defaults for n in ast.walk(d) if isinstance(n, ast.Name)}
    return _global_names(fn.__code__) | outer


def _importable(value: Any) -> str | None:
    """The name under which the module of ``value`` holds it, or None."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    known = getattr(value, "__qualname__", None)
    return known if isinstance(known, str) and module and getattr(module, known, None) is value else None


def _snapshot(value: Any) -> str | None:
    """An expression for a small value that pickles without naming the notebook, or None."""
    try:
        data = pack(value)
    except Exception:  # whatever a class raises when it cannot be pickled
        return None
    return f"pickle.loads({data!r})" if len(data) <= SNAPSHOT_BYTES else None


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
    for name in sorted(_names(fn, _source(fn)) & set(fn.__globals__)):
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
            alias = "" if name == value.__name__ else f"{name} = {value.__name__}\n"
            lines[name] = lines.pop(name) or _source(value) + "\n" + alias
        elif module != main and (known := _importable(value)) is not None:
            lines[name] = f"from {module} import {known} as {name}"
        elif _is_plain(value):
            lines[name] = f"{name} = {value!r}"
        elif (expression := _snapshot(value)) is not None:
            lines[name] = f"import pickle\n{name} = {expression}"
        elif isinstance(value, type):
            raise ShipError(
                f"function {fn.__name__!r} refers to the class {name!r}, which is defined in the notebook; "
                "define it in a .py file and import it"
            )
        else:
            raise ShipError(
                f"function {fn.__name__!r} refers to the notebook variable {name!r} of type {type(value).__name__}, "
                f"which cannot be copied to another process (it does not pickle, or is larger than {SNAPSHOT_BYTES} "
                "bytes); make it inside the function, or pass a large tensor through args="
            )


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        named = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if named.__module__ == "__main__":
            raise ShipError(
                f"an argument holds {named.__qualname__!r}, which is defined in this notebook: no other process can "
                "import it; define it in a .py file, or pass plain data"
            )
        return NotImplemented


def pack(value: Any) -> bytes:
    """Pickle ``value`` for another process.

    Raises:
        ShipError: it holds something that is defined in a notebook. A script's own definitions are fine.
    """
    if getattr(sys.modules["__main__"], "__file__", None):
        return pickle.dumps(value)
    buffer = io.BytesIO()
    _Packer(buffer).dump(value)
    return buffer.getvalue()


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
        source = "\n\n".join(["from __future__ import annotations", *lines.values(), _source(fn)])
    name = "shipped_" + hashlib.sha256(source.encode()).hexdigest()[:16]
    (directory / f"{name}.py").write_text(source + "\n", encoding="utf-8")
    return name, qualname, str(directory)
