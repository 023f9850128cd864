"""Codes of 8 bit, predicted along tokens and coded: compiled, for one thread.

A *part* is K or V of one cell of a block: ``num_rows`` channels of ``num_slots`` numbers each. A number is predicted
from those before it in its row, and what is left is coded with a table that follows from what is decoded already, so
nothing but codes is written::

    slot 0       nothing is known: a table for K, and one for V
    slots 1..3   predicted; again one table each
    slots 4..    the table by how much was left of the row's first three predictions, and of those of the whole part

K is predicted as the mean of the row's last number and of its mean so far (rotated keys change slowly along tokens), V
as its mean so far. Four rows are coded side by side, each into a stream of its own: four chains of look-ups keep a core
busy where one would wait. A decoder never reads behind the streams: what is damaged gives wrong bytes, which the
checksum finds.
"""

from __future__ import annotations

import numpy as np

from pagefold.kernels.compiled import part
from pagefold.kernels.kept import kernel
from pagefold.transport.tables import MAX_BITS

__all__ = ["NUM_STREAMS", "PART_FIELDS", "RECIPROCALS", "pack_parts", "unpack_parts"]

NUM_STREAMS = 4
PART_FIELDS = ("begin", "is_value", "num_rows", "num_slots", "row_stride", "slot_stride")
"""What is said of a part: where it begins, what it is, and its shape; strides in bytes. Rows are a multiple of 4."""

_U0, _U1, _U2, _U3, _U4, _U5 = (np.uint64(number) for number in range(6))
_LEN_SHIFT, _CODE_SHIFT, _WORD, _TABLE_SHIFT = np.uint64(8), np.uint64(16), np.uint64(32), np.uint64(MAX_BITS)
_NEXT = np.uint64(2**MAX_BITS - 1)
_CODE = np.uint64(0xFFFF)

_WARM = 4
_FIRST_TABLE, _WARM_TABLE = (15, 21), (13, 20)  # of K, of V
_TABLES_PER_BIT = 4  # a number of half the scale, for 1.18^4 is nearly 2
_OF_PART, _OF_ROW = (54, 76), (30, 18)  # how the scale follows, in 256ths, from what is left of three predictions
_MOST_SCALE = 8191

RECIPROCALS = np.array(
    [
        [2**17 // (2 * slot + 1) if slot else 0 for slot in range(256)],  # half of 1 / (slot + 1/2), for K
        [(2**16 + (slot + 1) // 2) // (slot + 1) if slot else 0 for slot in range(256)],  # 1 / (slot + 1), for V
    ],
    dtype=np.int32,
)
"""What a sum so far is multiplied with, in parts of 2^17 and 2^16."""


@part(inline="always")
def _predict(is_value, total, last, reciprocal):
    """Return the prediction of the next number of a row with this total and last number. Shifts round down."""
    if is_value:
        return (total * reciprocal + 32768) >> 16
    return (total * reciprocal + (last << 16) + 65536) >> 17


# Arrays are no arguments of what is inlined: counting who holds them would cost more than the work itself.


@part(inline="always")
def _refill(word, at, end, bits, num):
    """Have at least 32 bits. What comes behind the stream's end means nothing. No branch: nobody can guess it."""
    lacks = np.uint64(num < _WORD)
    bits |= (np.uint64(word) * lacks) << num
    return at + (lacks & np.uint64(at < end)), bits, num + (lacks << _U5)


@part(inline="always")
def _take(entry, bits, num):
    """Take the code that was looked up; return its symbol, too."""
    length = np.uint64(entry) >> _LEN_SHIFT
    return np.uint8(entry), bits >> length, num - length


@part(inline="always")
def _append(code, bits, num):
    """Add a code."""
    entry = np.uint64(code)
    return bits | ((entry & _CODE) << num), num + (entry >> _CODE_SHIFT)


@part(inline="always")
def _advance(at, bits, num):
    """Go on to the next word when one is full, which has been written."""
    if num >= _WORD:
        return at + _U1, bits >> _WORD, num - _WORD
    return at, bits, num


@part()
def _predict_rows(numbers, residuals, left, is_value, shape, reciprocals):
    """From numbers to residuals, ``[num_slots, num_rows]`` both; note what is left of the first predictions of rows."""
    num_rows, num_slots = shape
    totals, lasts = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    left[:num_rows] = 0
    for slot in range(num_slots):
        reciprocal, begin = reciprocals[slot], slot * num_rows
        for row in range(num_rows):
            number = np.int32(np.int8(numbers[begin + row]))
            residual = np.int8(number - _predict(is_value, totals[row], lasts[row], reciprocal))
            if 0 < slot < _WARM:
                left[row] += abs(np.int32(residual))
            totals[row] += number
            lasts[row] = number
            residuals[begin + row] = np.uint8(residual)


@part()
def _restore_rows(residuals, left, totals, lasts, is_value, num_rows, slots, reciprocals):
    """From residuals of some slots to numbers, in place."""
    for slot in range(slots[0], slots[1]):
        reciprocal, begin = reciprocals[slot], slot * num_rows
        if slot < _WARM:
            for row in range(num_rows):
                left[row] += abs(np.int32(np.int8(residuals[begin + row]))) if slot else 0
        for row in range(num_rows):
            residual = np.int32(np.int8(residuals[begin + row]))
            number = np.int32(np.int8(residual + _predict(is_value, totals[row], lasts[row], reciprocal)))
            totals[row] += number
            lasts[row] = number
            residuals[begin + row] = np.uint8(number)


@part()
def _table_of(nearest, kind, of_part, of_row):
    """Return the table for a row of which so much was left, in a part of which so much was left on average."""
    return nearest[min((_OF_PART[kind] * of_part + _OF_ROW[kind] * of_row) >> 4, _MOST_SCALE)]


@kernel(error_model="numpy")
def pack_parts(data, parts, dropped_bits, codes, nearest, reciprocals, streams, ends):
    """Code the parts of one block.

    Args:
        data: uint8 ``[block_bytes]``.
        parts: int64 ``[P, 6]``; see ``PART_FIELDS``.
        dropped_bits: of the numbers, which are 0: they are coded without.
        codes, nearest: of the tables, codes flat.
        reciprocals: ``RECIPROCALS``.
        streams: uint32 ``[4, N]``, written; long enough for codes of the greatest length.
        ends: int64 ``[4]``, written: the words of each stream.
    """
    most = np.max(parts[:, 2] * parts[:, 3])
    numbers, residuals = np.empty(most, np.uint8), np.empty(most, np.uint8)
    left = np.zeros(np.max(parts[:, 2]), np.int32)
    at_0, bits_0, num_0 = _U0, _U0, _U0
    at_1, bits_1, num_1 = _U0, _U0, _U0
    at_2, bits_2, num_2 = _U0, _U0, _U0
    at_3, bits_3, num_3 = _U0, _U0, _U0
    coarser = _TABLES_PER_BIT * dropped_bits
    for index in range(len(parts)):
        begin, kind, num_rows, num_slots, row_stride, slot_stride = parts[index]
        for slot in range(num_slots):
            for row in range(num_rows):
                number = np.int8(data[begin + row * row_stride + slot * slot_stride])
                numbers[slot * num_rows + row] = np.uint8(number >> dropped_bits)
        _predict_rows(numbers, residuals, left, kind == 1, (num_rows, num_slots), reciprocals[kind])
        rows = np.uint64(num_rows)
        for slot in range(min(_WARM, num_slots)):
            table = np.uint64((_WARM_TABLE[kind] if slot else _FIRST_TABLE[kind]) - coarser) << _LEN_SHIFT
            place, last = np.uint64(slot) * rows, np.uint64(slot + 1) * rows
            while place < last:
                bits_0, num_0 = _append(codes[table + np.uint64(residuals[place])], bits_0, num_0)
                streams[0, at_0] = np.uint32(bits_0)
                at_0, bits_0, num_0 = _advance(at_0, bits_0, num_0)
                bits_1, num_1 = _append(codes[table + np.uint64(residuals[place + _U1])], bits_1, num_1)
                streams[1, at_1] = np.uint32(bits_1)
                at_1, bits_1, num_1 = _advance(at_1, bits_1, num_1)
                bits_2, num_2 = _append(codes[table + np.uint64(residuals[place + _U2])], bits_2, num_2)
                streams[2, at_2] = np.uint32(bits_2)
                at_2, bits_2, num_2 = _advance(at_2, bits_2, num_2)
                bits_3, num_3 = _append(codes[table + np.uint64(residuals[place + _U3])], bits_3, num_3)
                streams[3, at_3] = np.uint32(bits_3)
                at_3, bits_3, num_3 = _advance(at_3, bits_3, num_3)
                place += _U4
        if num_slots <= _WARM:
            continue
        of_part = np.sum(left[:num_rows]) // num_rows
        for row in range(0, num_rows, NUM_STREAMS):
            table_0 = np.uint64(_table_of(nearest, kind, of_part, left[row + 0])) << _LEN_SHIFT
            table_1 = np.uint64(_table_of(nearest, kind, of_part, left[row + 1])) << _LEN_SHIFT
            table_2 = np.uint64(_table_of(nearest, kind, of_part, left[row + 2])) << _LEN_SHIFT
            table_3 = np.uint64(_table_of(nearest, kind, of_part, left[row + 3])) << _LEN_SHIFT
            for slot in range(_WARM, num_slots):
                place = np.uint64(slot) * rows + np.uint64(row)
                bits_0, num_0 = _append(codes[table_0 + np.uint64(residuals[place])], bits_0, num_0)
                streams[0, at_0] = np.uint32(bits_0)
                at_0, bits_0, num_0 = _advance(at_0, bits_0, num_0)
                bits_1, num_1 = _append(codes[table_1 + np.uint64(residuals[place + _U1])], bits_1, num_1)
                streams[1, at_1] = np.uint32(bits_1)
                at_1, bits_1, num_1 = _advance(at_1, bits_1, num_1)
                bits_2, num_2 = _append(codes[table_2 + np.uint64(residuals[place + _U2])], bits_2, num_2)
                streams[2, at_2] = np.uint32(bits_2)
                at_2, bits_2, num_2 = _advance(at_2, bits_2, num_2)
                bits_3, num_3 = _append(codes[table_3 + np.uint64(residuals[place + _U3])], bits_3, num_3)
                streams[3, at_3] = np.uint32(bits_3)
                at_3, bits_3, num_3 = _advance(at_3, bits_3, num_3)
    if num_0 > _U0:
        streams[0, at_0] = np.uint32(bits_0)
        at_0 += _U1
    if num_1 > _U0:
        streams[1, at_1] = np.uint32(bits_1)
        at_1 += _U1
    if num_2 > _U0:
        streams[2, at_2] = np.uint32(bits_2)
        at_2 += _U1
    if num_3 > _U0:
        streams[3, at_3] = np.uint32(bits_3)
        at_3 += _U1
    ends[0], ends[1], ends[2], ends[3] = at_0, at_1, at_2, at_3


@kernel(error_model="numpy")
def unpack_parts(words, ends, parts, dropped_bits, symbols, nearest, reciprocals, data):
    """Restore the parts of one block; see :func:`pack_parts`.

    Args:
        words: uint32 ``[N + 1]``: the streams, one behind the other, and a word that is not read.
        ends: int64 ``[5]``: where each begins, and where the last one ends; ascending, up to N.
        parts, dropped_bits, nearest, reciprocals: as there.
        symbols: of the tables, flat.
        data: uint8 ``[block_bytes]``, written where there are parts.
    """
    residuals = np.empty(np.max(parts[:, 2] * parts[:, 3]), np.uint8)
    most_rows = np.max(parts[:, 2])
    left, totals, lasts = np.zeros(most_rows, np.int32), np.zeros(most_rows, np.int32), np.zeros(most_rows, np.int32)
    at_0, end_0, bits_0, num_0 = np.uint64(ends[0]), np.uint64(ends[1]), _U0, _U0
    at_1, end_1, bits_1, num_1 = np.uint64(ends[1]), np.uint64(ends[2]), _U0, _U0
    at_2, end_2, bits_2, num_2 = np.uint64(ends[2]), np.uint64(ends[3]), _U0, _U0
    at_3, end_3, bits_3, num_3 = np.uint64(ends[3]), np.uint64(ends[4]), _U0, _U0
    coarser = _TABLES_PER_BIT * dropped_bits
    for index in range(len(parts)):
        begin, kind, num_rows, num_slots, row_stride, slot_stride = parts[index]
        left[:], totals[:], lasts[:] = 0, 0, 0
        rows = np.uint64(num_rows)
        num_warm = min(_WARM, num_slots)
        for slot in range(num_warm):
            table = np.uint64((_WARM_TABLE[kind] if slot else _FIRST_TABLE[kind]) - coarser) << _TABLE_SHIFT
            place, last = np.uint64(slot) * rows, np.uint64(slot + 1) * rows
            while place < last:
                at_0, bits_0, num_0 = _refill(words[at_0], at_0, end_0, bits_0, num_0)
                at_1, bits_1, num_1 = _refill(words[at_1], at_1, end_1, bits_1, num_1)
                at_2, bits_2, num_2 = _refill(words[at_2], at_2, end_2, bits_2, num_2)
                at_3, bits_3, num_3 = _refill(words[at_3], at_3, end_3, bits_3, num_3)
                residuals[place], bits_0, num_0 = _take(symbols[table + (bits_0 & _NEXT)], bits_0, num_0)
                residuals[place + _U1], bits_1, num_1 = _take(symbols[table + (bits_1 & _NEXT)], bits_1, num_1)
                residuals[place + _U2], bits_2, num_2 = _take(symbols[table + (bits_2 & _NEXT)], bits_2, num_2)
                residuals[place + _U3], bits_3, num_3 = _take(symbols[table + (bits_3 & _NEXT)], bits_3, num_3)
                place += _U4
        _restore_rows(residuals, left, totals, lasts, kind == 1, num_rows, (0, num_warm), reciprocals[kind])
        of_part = np.sum(left[:num_rows]) // num_rows
        if num_slots > _WARM:
            for row in range(0, num_rows, NUM_STREAMS):
                table_0 = np.uint64(_table_of(nearest, kind, of_part, left[row + 0])) << _TABLE_SHIFT
                table_1 = np.uint64(_table_of(nearest, kind, of_part, left[row + 1])) << _TABLE_SHIFT
                table_2 = np.uint64(_table_of(nearest, kind, of_part, left[row + 2])) << _TABLE_SHIFT
                table_3 = np.uint64(_table_of(nearest, kind, of_part, left[row + 3])) << _TABLE_SHIFT
                for slot in range(_WARM, num_slots, 2):  # two codes have at most 26 bits
                    at_0, bits_0, num_0 = _refill(words[at_0], at_0, end_0, bits_0, num_0)
                    at_1, bits_1, num_1 = _refill(words[at_1], at_1, end_1, bits_1, num_1)
                    at_2, bits_2, num_2 = _refill(words[at_2], at_2, end_2, bits_2, num_2)
                    at_3, bits_3, num_3 = _refill(words[at_3], at_3, end_3, bits_3, num_3)
                    place = np.uint64(slot) * rows + np.uint64(row)
                    residuals[place], bits_0, num_0 = _take(symbols[table_0 + (bits_0 & _NEXT)], bits_0, num_0)
                    residuals[place + _U1], bits_1, num_1 = _take(symbols[table_1 + (bits_1 & _NEXT)], bits_1, num_1)
                    residuals[place + _U2], bits_2, num_2 = _take(symbols[table_2 + (bits_2 & _NEXT)], bits_2, num_2)
                    residuals[place + _U3], bits_3, num_3 = _take(symbols[table_3 + (bits_3 & _NEXT)], bits_3, num_3)
                    place += rows
                    residuals[place], bits_0, num_0 = _take(symbols[table_0 + (bits_0 & _NEXT)], bits_0, num_0)
                    residuals[place + _U1], bits_1, num_1 = _take(symbols[table_1 + (bits_1 & _NEXT)], bits_1, num_1)
                    residuals[place + _U2], bits_2, num_2 = _take(symbols[table_2 + (bits_2 & _NEXT)], bits_2, num_2)
                    residuals[place + _U3], bits_3, num_3 = _take(symbols[table_3 + (bits_3 & _NEXT)], bits_3, num_3)
            _restore_rows(residuals, left, totals, lasts, kind == 1, num_rows, (num_warm, num_slots), reciprocals[kind])
        for row in range(num_rows):
            for slot in range(num_slots):
                number = np.int8(residuals[slot * num_rows + row])
                data[begin + row * row_stride + slot * slot_stride] = np.uint8(number << dropped_bits)
