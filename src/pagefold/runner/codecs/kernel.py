"""Encoding as kernels do it: the bits of ``vectors.py``'s formats, number by number. float32.

Everything here is a single operation that IEEE 754 rounds, in the order in which torch's twin does it: a slab that was
written by this and one that was written by the twin are equal in bytes.
"""

from __future__ import annotations

import numpy as np

from pagefold.kernels.bits import bits_of, float_of_bits
from pagefold.kernels.compiled import part
from pagefold.kv.codec import num_wide
from pagefold.runner.attention.tiles import (
    BFLOAT16,
    E4M3_SCALED,
    E5M2,
    FLOAT16,
    FLOAT32,
    INT4,
    INT4_SYMMETRIC,
    INT8,
    TWO_WIDTHS,
)
from pagefold.runner.codecs.int4_symmetric import SHARE
from pagefold.runner.codecs.levels import INVERSE, REACH
from pagefold.runner.codecs.two_widths import WIDE_REACH

__all__ = [
    "encode",
    "encode_int2",
    "from_bfloat16",
    "from_float16",
    "hadamard",
    "into_basis",
    "to_float16",
    "wide_of",
]

_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to whole numbers, halves to even
_TINY = np.float32(2.0**-126)
_INFINITY = np.float32(np.inf)
_SIGN, _SIZE = np.int32(-(2**31)), np.int32(2**31 - 1)
_UPPER, _LOWER = np.int32(-0x10000), np.int32(0xFFFF)
_FLOAT16_MAX, _BFLOAT16_MAX = np.float32(65504.0), np.float32(3.3895313892515355e38)
_HALF_TO_FLOAT = np.float32(2.0**112)  # float32's exponents begin 112 lower
_E4M3_MAX, _E5M2_MAX = np.float32(448.0), np.float32(57344.0)
_ONE = np.float32(1.0)
_WIDE_REACH, _REACH, _SHARE = np.float32(WIDE_REACH), np.float32(REACH), np.float32(SHARE)
_ZERO, _MIDDLE, _LAST = np.float32(0.0), np.float32(7.5), np.float32(15.0)
_FIRST, _THIRD, _FIFTH = (np.float32(one) for one in INVERSE)
_CUBES = np.float32(1 / 128)

wide_of = part()(num_wide)
"""See ``kv/codec.py``."""


@part()
def from_bfloat16(half):
    """Return the float32 of a bfloat16's bits, uint16."""
    return float_of_bits(np.int32(np.int32(half) << np.int32(16)))


@part()
def from_float16(half):
    """Return the float32 of a float16's bits, uint16. Infinity, which is never stored, is NaN."""
    size = np.int32(half) & np.int32(0x7FFF)
    if size >= np.int32(0x7C00):
        return np.float32(np.nan)
    number = float_of_bits(np.int32(size << np.int32(13))) * _HALF_TO_FLOAT
    return -number if half & np.uint16(0x8000) else number


@part()
def _up(number):
    """Round a number of at least 0 to bfloat16, up; see ``vectors.up_to_bfloat16``."""
    if number != number:  # noqa: PLR0124 - NaN
        return number
    return float_of_bits(np.int32((bits_of(number) + _LOWER) & _UPPER))


@part()
def _down(number):
    """Round a number to bfloat16, down; see ``vectors.down_to_bfloat16``."""
    if number < 0:
        return -_up(-number)
    return float_of_bits(np.int32(bits_of(number) & _UPPER)) + np.float32(0.0)


@part()
def _upper_half(number):
    """Return the bits of a float32 that is a bfloat16, uint16."""
    return np.uint16((bits_of(number) >> np.int32(16)) & _LOWER)


@part()
def _small_float(number, mantissa_bits, least_exponent, largest, infinity_code):
    """Round to a floating point of few bits, to the nearest, halves to even; it saturates. Return its code."""
    sign = np.int32(1) if bits_of(number) < 0 else np.int32(0)
    size = float_of_bits(np.int32(bits_of(number) & _SIZE))
    if size != size:  # noqa: PLR0124 - NaN
        return sign, infinity_code
    size = min(size, largest)
    exponent = max(np.int32((bits_of(size) >> np.int32(23)) - np.int32(127)), least_exponent)
    one_step = float_of_bits(np.int32((exponent - mantissa_bits + np.int32(127)) << np.int32(23)))
    steps = np.int32((size / one_step + _MAGIC) - _MAGIC)  # up to 2^(mantissa_bits + 1): it may carry into the exponent
    return sign, np.int32(((exponent - least_exponent) << mantissa_bits) + steps)


@part()
def to_float16(number):
    """Round to float16; it saturates. Return its bits, uint16."""
    sign, code = _small_float(number, np.int32(10), np.int32(-14), _FLOAT16_MAX, np.int32(0x7E00))
    return np.uint16(sign << np.int32(15) | code)


@part()
def _encode_float(codes, halves, floats, form, vector, begin, step):
    for d in range(len(vector)):
        number, at = vector[d], begin + d * step
        if form == FLOAT32:
            floats[at // 4] = number
        elif form == FLOAT16:
            halves[at // 2] = to_float16(number)
        elif form == BFLOAT16:
            size = min(max(number, -_BFLOAT16_MAX), _BFLOAT16_MAX)
            if number != number:  # noqa: PLR0124 - NaN
                halves[at // 2] = np.uint16(0x7FC0)
            else:
                bits = bits_of(size)
                even = (bits >> np.int32(16)) & np.int32(1)
                halves[at // 2] = np.uint16(((bits + np.int32(0x7FFF) + even) >> np.int32(16)) & _LOWER)
        elif form == E5M2:
            sign, code = _small_float(number, np.int32(2), np.int32(-14), _E5M2_MAX, np.int32(0x7F))
            codes[at] = np.uint8(sign << np.int32(7) | code)
        else:
            sign, code = _small_float(number, np.int32(3), np.int32(-6), _E4M3_MAX, np.int32(0x7F))
            codes[at] = np.uint8(sign << np.int32(7) | code)


@part()
def _largest(vector):
    """Return the largest size of a vector's numbers; NaN if one is."""
    top = np.float32(0.0)
    for d in range(len(vector)):
        size = abs(vector[d])
        if size > top or size != size:  # noqa: PLR0124 - NaN, which nothing passes afterwards
            top = size
    return top


@part()
def _scale(largest, num_steps):
    """See ``vectors.scales_of``. NaN stays NaN."""
    scale = _up(largest / num_steps)
    return max(scale, _TINY)


@part()
def _rounded(number, least, most):
    return min(max((number + _MAGIC) - _MAGIC, least), most)


@part()
def _larger(a, b):
    """Return the larger of two numbers; NaN if one is."""
    if a != a or b != b:  # noqa: PLR0124 - NaN
        return a + b
    return max(a, b)


@part()
def _level_code(number):
    """Return the code, a whole float32, of a number in scales; see ``levels.py``."""
    square = number * number
    return _rounded(number * (_FIRST + square * (_THIRD + square * _FIFTH)) + _MIDDLE, _ZERO, _LAST)


@part()
def _level_error(vector, scale):
    """Return the squared error of a vector in sixteen levels; see ``int4_symmetric.py``."""
    error = _ZERO
    for d in range(len(vector)):
        found = _level_code(vector[d] / scale) - _MIDDLE
        distance = vector[d] - (found + found * found * found * _CUBES) * scale
        error += distance * distance
    return error


@part()
def _encode_pairs(codes, vector, scale, is_number, begin, step):
    """Write codes of sixteen levels, of which a byte holds two: zeros where the vector is no number."""
    half = len(vector) // 2
    for d in range(half):
        low = high = np.int32(0)
        if is_number:
            low = np.int32(_level_code(vector[d] / scale))
            high = np.int32(_level_code(vector[d + half] / scale))
        codes[begin + d * step] = np.uint8(low | high << np.int32(4))


@part()
def encode_int2(block, vector, begin, period, first_code, scale_at, zero_at):
    """Write numbers that share a scale and a zero point as codes of 2 bit; see ``int2.py``.

    Args:
        block: (uint8, uint16): the same block as numbers of each kind.
        vector: float32 ``[n]``.
        begin: byte of the first code.
        period: so many codes lie in bytes behind each other; those that follow lie in the same bytes, higher.
        first_code: which of its byte's codes the first one is. Who writes code 0 writes the byte, others add to it.
        scale_at, zero_at: bytes of scale and zero point.
    """
    codes, halves = block
    least, most, is_lost = vector[0], vector[0], False
    for i in range(len(vector)):
        least, most = min(least, vector[i]), max(most, vector[i])
        is_lost = is_lost or vector[i] != vector[i]
    zero = _down(least)
    scale = _scale(most - zero, np.float32(3.0))
    is_lost = is_lost or not scale < _INFINITY
    halves[scale_at // 2] = np.uint16(0x7FC0) if is_lost else _upper_half(scale)
    halves[zero_at // 2] = np.uint16(0) if is_lost else _upper_half(zero)
    for i in range(len(vector)):
        at, which = begin + i % period, first_code + i // period
        code = np.int32(0)
        if not is_lost:
            code = np.int32(_rounded((vector[i] - zero) / scale, np.float32(0.0), np.float32(3.0)))
        before = np.int32(codes[at]) if which else np.int32(0)
        codes[at] = np.uint8(before | code << np.int32(2 * which))


@part()
def encode(block, form, vector, begin, step, scale_at, block_size):
    """Write one vector into its slot.

    Args:
        block: (uint8, uint16, float32): the same block as numbers of each kind.
        form: number of the format.
        vector: float32 ``[D]``. It may be changed.
        begin: byte of its first code.
        step: bytes from one code, or pair of codes, to the next.
        scale_at: byte of its scale.
        block_size: so many scales on is its zero point.
    """
    codes, halves, floats = block
    size = len(vector)
    if form == INT8:
        scale = _scale(_largest(vector), np.float32(127.0))
        halves[scale_at // 2] = _upper_half(scale)
        is_number = scale < _INFINITY  # else what was lost is seen by its scale
        for d in range(size):
            code = np.int32(_rounded(vector[d] / scale, np.float32(-127.0), np.float32(127.0))) if is_number else 0
            codes[begin + d * step] = np.uint8(code & 255)
    elif form == INT4:
        least, most, is_lost = vector[0], vector[0], False
        for d in range(size):
            least, most = min(least, vector[d]), max(most, vector[d])
            is_lost = is_lost or vector[d] != vector[d]
        zero = _down(least)
        scale = _scale(most - zero, np.float32(15.0))
        is_lost = is_lost or not scale < _INFINITY
        halves[scale_at // 2] = np.uint16(0x7FC0) if is_lost else _upper_half(scale)
        halves[scale_at // 2 + block_size] = np.uint16(0) if is_lost else _upper_half(zero)
        half = size // 2
        for d in range(half):
            low = high = np.int32(0)
            if not is_lost:
                low = np.int32(_rounded((vector[d] - zero) / scale, np.float32(0.0), np.float32(15.0)))
                high = np.int32(_rounded((vector[d + half] - zero) / scale, np.float32(0.0), np.float32(15.0)))
            codes[begin + d * step] = np.uint8(low | high << np.int32(4))
    elif form == INT4_SYMMETRIC:
        largest = _largest(vector)
        scale = _scale(largest, _REACH)
        is_number = scale < _INFINITY
        if is_number:
            finer = _scale(largest * _SHARE, _REACH)
            if _level_error(vector, finer) < _level_error(vector, scale):
                scale = finer
        halves[scale_at // 2] = _upper_half(scale) if is_number else np.uint16(0x7FC0)
        _encode_pairs(codes, vector, scale, is_number, begin, step)
    elif form == TWO_WIDTHS:
        wide = wide_of(size)
        largest = _larger(_largest(vector[:wide]) / _WIDE_REACH, _largest(vector[wide:]) / _REACH)
        scale = _scale(largest, _ONE)
        is_number = scale < _INFINITY
        halves[scale_at // 2] = _upper_half(scale) if is_number else np.uint16(0x7FC0)
        for d in range(wide):
            code = np.int32(_rounded(vector[d] / scale, -_WIDE_REACH, _WIDE_REACH)) if is_number else 0
            codes[begin + d * step] = np.uint8(code & 255)
        _encode_pairs(codes, vector[wide:], scale, is_number, begin + wide * step, step)
    elif form == E4M3_SCALED:
        scale = _scale(_largest(vector), _E4M3_MAX)
        halves[scale_at // 2] = _upper_half(scale)
        for d in range(size):
            vector[d] /= scale
        _encode_float(codes, halves, floats, form, vector, begin, step)
    else:
        _encode_float(codes, halves, floats, form, vector, begin, step)


@part()
def hadamard(vector, size, room):
    """Rotate a vector in place: runs of ``size`` numbers, a power of two; see ``hadamard.py``. ``room`` is as long.

    Every pass adds and subtracts neighbours and puts sums before differences, so its loop is the same each time.
    """
    factor = _ONE / np.sqrt(np.float32(size))
    half = size // 2
    for first in range(0, len(vector), size):
        here, there = vector[first : first + size], room[first : first + size]
        width = 1
        while width < size:
            for i in range(half):
                a, b = here[2 * i], here[2 * i + 1]
                there[i] = a + b
                there[half + i] = a - b
            here, there = there, here
            width *= 2
        for i in range(size):
            vector[first + i] = here[i] * factor


@part()
def into_basis(vector, basis, room):
    """Multiply a vector by a matrix ``[D, D]`` in place: ``sum over j of vector[j] * basis[j]``; see ``basis.py``.

    ``room`` is as long; 4 divides D. Sums are in the order of j: torch's twin has the same bits.
    """
    size = len(vector)
    for i in range(size):
        room[i] = _ZERO
    for j in range(0, size, 4):  # sums are loaded and stored once for four of their terms
        a, b, c, d = vector[j], vector[j + 1], vector[j + 2], vector[j + 3]
        row_a, row_b, row_c, row_d = basis[j], basis[j + 1], basis[j + 2], basis[j + 3]
        for i in range(size):
            room[i] = (((room[i] + a * row_a[i]) + b * row_b[i]) + c * row_c[i]) + d * row_d[i]
    for i in range(size):
        vector[i] = room[i]
