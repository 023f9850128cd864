"""The bits of float32 numbers in kernels: Numba has no name for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagefold.kernels.compiled import part

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bits_of", "float_of_bits", "to_bfloat16"]

_HIGH, _LOWER, _LAST_BUT_HALF, _QUIET = (np.int32(one) for one in (16, 0xFFFF, 0x7FFF, 0x40))


@intrinsic
def bits_of(typing, number):
    """Return the bits of a float32, as int32."""
    return types.int32(types.float32), _cast_to(ir.IntType(32))


@intrinsic
def float_of_bits(typing, bits):
    """Return the float32 of such bits."""
    return types.float32(types.int32), _cast_to(ir.FloatType())


def _cast_to(kind: ir.Type) -> Callable[..., ir.Value]:
    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        return builder.bitcast(args[0], kind)

    return generate


@part()
def to_bfloat16(number):
    """Round a float32 to bfloat16, ties to even; return its bits, uint16. A NaN stays one."""
    bits = bits_of(number)
    if number != number:  # noqa: PLR0124 - NaN
        return np.uint16(((bits >> _HIGH) & _LOWER) | _QUIET)
    last = (bits >> _HIGH) & np.int32(1)
    return np.uint16((np.int32(bits + _LAST_BUT_HALF + last) >> _HIGH) & _LOWER)
