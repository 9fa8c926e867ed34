"""Sixty-four cells at a time: the few vector operations that the compiled loops need and Numba does not offer.

Each emits plain LLVM vector code without intrinsics of one processor, so that it compiles wherever Numba does: to a
compare into mask registers on AVX-512, to shorter vectors elsewhere. Indices are not checked: the caller does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending
from numba.core import types
from numba.np import arrayobj

make_array: Any = arrayobj.make_array
QUADRUPLE: Any = types.Tuple(  # type: ignore[no-untyped-call]
    (types.int64,) * 4
)
LANES = 64  # cells of a block, one for each bit of a mask


def _intrinsic(function: Any) -> Any:
    return extending.intrinsic(function)


def _load(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    """The vector of 64 cells that begins at ``start`` of a contiguous array."""
    cell = ir.IntType(array_type.dtype.bitwidth)
    first = builder.gep(make_array(array_type)(context, builder, array).data, [start])
    pointer = builder.bitcast(first, ir.VectorType(cell, LANES).as_pointer())
    return builder.load(pointer, align=array_type.dtype.bitwidth // 8)


def _splat(builder: Any, value: Any, to: Any) -> Any:
    """A vector whose lanes all are ``value``, cut or widened to the type of a lane."""
    cell = to.element
    if value.type.width > cell.width:
        value = builder.trunc(value, cell)
    elif value.type.width < cell.width:
        value = builder.zext(value, cell)
    one = builder.insert_element(ir.Constant(to, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(to, ir.Undefined), lanes)


@_intrinsic
def different(typing_context: Any, a: Any, b: Any, start: Any) -> Any:
    """Bit ``i`` says whether cells ``start + i`` of two arrays of one type differ."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right = (_load(context, builder, signature.args[i], args[i], args[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(a, b, types.int64), generate


@_intrinsic
def equal(typing_context: Any, a: Any, start: Any, value: Any) -> Any:
    """Bit ``i`` says whether cell ``start + i`` is ``value``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cells = _load(context, builder, signature.args[0], args[0], args[1])
        same = builder.icmp_unsigned("==", cells, _splat(builder, args[2], cells.type))
        return builder.bitcast(same, ir.IntType(64))

    return types.uint64(a, types.int64, types.int64), generate


@_intrinsic
def classify(typing_context: Any, cells: Any, start: Any, how: Any, out: Any, at: Any) -> Any:
    """Write ``min(max(((cell >> shift) & mask) - first, 0), last)`` of 64 cells into ``out`` (uint8) from ``at`` on.

    ``how`` is the tuple (shift, mask, first, last); the last at most 255.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _load(context, builder, signature.args[0], args[0], args[1])
        shift, mask, first, last = (_splat(builder, builder.extract_value(args[2], i), vector.type) for i in range(4))
        vector = builder.and_(builder.lshr(vector, shift), mask)
        above = builder.icmp_unsigned(">", vector, first)
        zero = ir.Constant(vector.type, [0] * LANES)
        vector = builder.select(above, builder.sub(vector, first), zero)
        vector = builder.select(builder.icmp_unsigned("<", vector, last), vector, last)
        narrow = ir.VectorType(ir.IntType(8), LANES)
        vector = builder.trunc(vector, narrow) if vector.type != narrow else vector
        target = builder.gep(make_array(signature.args[3])(context, builder, args[3]).data, [args[4]])
        builder.store(vector, builder.bitcast(target, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(cells, types.int64, QUADRUPLE, out, types.int64), generate


@_intrinsic
def ones(typing_context: Any, mask: Any) -> Any:
    """Number of bits that are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@_intrinsic
def lowest(typing_context: Any, mask: Any) -> Any:
    """Index of the lowest bit that is set; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@_intrinsic
def copy(typing_context: Any, cells: Any, start: Any, out: Any) -> Any:
    """Copy cells ``start`` to ``start + 63`` to the same place of another array of the type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _load(context, builder, signature.args[0], args[0], args[1])
        target = builder.gep(make_array(signature.args[2])(context, builder, args[2]).data, [args[1]])
        align = vector.type.element.width // 8
        builder.store(vector, builder.bitcast(target, vector.type.as_pointer()), align=align)
        return context.get_dummy_value()

    return types.void(cells, types.int64, out), generate
