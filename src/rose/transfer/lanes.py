"""Instructions numba has no words for: what the hot loops of `delta` are made of."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
"""Elements compared at once: one bit each of a word."""


@intrinsic
def differing(_: Any, old: Any, new: Any, at: Any) -> Any:
    """Of the `LANES` elements from `at`, which differ: bit i for element `at + i`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), LANES)
        sides = [
            builder.load(
                builder.bitcast(_element(context, builder, kind, array, args[2]), pointer), align=1
            )
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
            for pointer in [vector.as_pointer()]
        ]
        return builder.bitcast(builder.icmp_unsigned("!=", *sides), ir.IntType(LANES))

    return types.uint64(old, new, types.intp), generate


@intrinsic
def ones(_: Any, mask: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def prefetch(_: Any, array: Any, at: Any) -> Any:
    """Have the element in the cache soon. Harmless where there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, word, word, word]),
            "llvm.prefetch.p0i8",
        )
        element = _element(context, builder, signature.args[0], args[0], args[1])
        reading, keep, data = word(0), word(3), word(1)
        builder.call(function, [builder.bitcast(element, byte), reading, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _element(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])
