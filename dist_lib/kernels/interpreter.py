"""Run a Triton kernel on CPU tensors, for tests: Triton's interpreter for one kernel and what it calls.

The environment variable that switches the interpreter on turns all of Triton over to it, for good. This interprets one
launch and leaves everything as it was. It shows that the arithmetic is right, not that the kernel compiles.
"""

import functools
import types
from unittest import mock

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@functools.lru_cache(maxsize=256)
def _interpreted(fn: types.FunctionType) -> InterpretedFunction:
    names = {**fn.__globals__, "core": tl.core}  # a copy, as the interpreter adds names; core: to be patched as tl is
    copy = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__annotations__, copy.__kwdefaults__, copy.__module__ = fn.__annotations__, fn.__kwdefaults__, fn.__module__
    return InterpretedFunction(copy)


def _call(self: JITFunction, *args, **kwargs):
    """What calling a helper means while a kernel is interpreted (compiled, the compiler inlines it)."""
    return _interpreted(self.fn).rewrite()(*args, **kwargs)


class Interpreted:
    """``Interpreted(kernel)[grid](...)`` runs it on CPU tensors."""

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = _interpreted(kernel.fn)

    def __getitem__(self, grid):
        def launch(*args, **kwargs) -> None:
            with mock.patch.object(JITFunction, "__call__", _call):
                self._kernel[grid](*args, **kwargs)

        return launch
